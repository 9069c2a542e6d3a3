"""Desktops of a run: leased from its gateway, one an episode."""

from __future__ import annotations

import io
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import numpy as np
from PIL import Image

from rollout.ports import DesktopPort
from sandbox_cluster.api import EvaluateReply, ExecuteReply, Requirements
from sandbox_cluster.client import SandboxClient, Shot
from slime_cua.config.sandbox import SandboxConfig
from slime_cua.core.actions import CodeAction, GuiAction
from slime_cua.core.errors import SandboxError
from slime_cua.core.types import Task


class GatewayDesktops:
    """`rollout.player.Desktops` over a sandbox gateway."""

    def __init__(self, url: str, token: str, config: SandboxConfig, *, is_blind: bool = False) -> None:
        self._client = SandboxClient(url, token, config, owner=f"rollout-{secrets.token_hex(4)}")
        self._is_blind = is_blind
        self._num_leased = self._num_given_back = 0
        self._requirements = Requirements(os=config.os, screen_wh_px=config.screen_wh_px)

    @asynccontextmanager
    async def lease(self, task: Task, episode_id: str) -> AsyncIterator[DesktopPort]:
        """A clean desktop until the block ends, of the task's `metadata["os"]` where it has one (else the config's). The key
        is fresh: an episode played again must not get the old desktop.

        While other episodes have desktops it queues again for one, however long: after the loss of a host there are fewer
        desktops than episodes, and that makes a run slow, not wrong. Raises SandboxError when nobody had one and none
        became free within acquire_timeout_s.
        """
        system = task.metadata.get("os") or self._requirements.os
        requirements = self._requirements.model_copy(update={"os": system})
        async with AsyncExitStack() as stack:
            while True:
                key, given_back = f"{episode_id}-{secrets.token_hex(8)}", self._num_given_back
                lease = self._client.lease(
                    key=key, task_id=task.id, episode_id=episode_id, requirements=requirements
                )
                try:
                    sandbox = await stack.enter_async_context(lease)
                    break
                except SandboxError as error:
                    was_busy = self._num_leased or self._num_given_back > given_back
                    if not (str(error).startswith("unavailable") and was_busy):
                        raise
            self._num_leased += 1
            stack.callback(self._given_back)
            yield Blindfold(sandbox) if self._is_blind else sandbox

    def _given_back(self) -> None:
        self._num_leased -= 1
        self._num_given_back += 1

    async def close(self) -> None:
        await self._client.close()


class Blindfold:
    """A desktop whose screenshots are all one grey: what a policy still solves, it solves without the screen."""

    def __init__(self, desktop: DesktopPort) -> None:
        self._desktop = desktop

    async def setup(self, task: Task) -> object:
        return await self._desktop.setup(task)

    async def screenshot(self) -> Shot:
        return grey(await self._desktop.screenshot())

    async def step(self, actions: Sequence[GuiAction], action_id: str) -> Shot:
        return grey(await self._desktop.step(actions, action_id))

    async def execute(self, action: CodeAction, action_id: str) -> ExecuteReply:
        return await self._desktop.execute(action, action_id)

    async def evaluate(self, task: Task, last_action: str | None) -> EvaluateReply:
        return await self._desktop.evaluate(task, last_action)


def grey(shot: Shot) -> Shot:
    """`shot` with every pixel 50 % grey."""
    pixels = np.full((shot.height_px, shot.width_px, 3), 128, np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return replace(shot, png=buffer.getvalue())
