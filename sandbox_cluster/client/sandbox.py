"""A leased desktop as an episode sees it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sandbox_cluster.api import (
    EvaluateReply,
    EvaluateRequest,
    ExecuteReply,
    ExecuteRequest,
    Lease,
    Settle,
    SetupReply,
    SetupRequest,
    StepReply,
    StepRequest,
)
from sandbox_cluster.client.images import checked
from sandbox_cluster.tasks.steps import inline_files
from slime_cua.core.actions import CodeAction, GuiAction
from slime_cua.core.errors import SandboxError
from slime_cua.core.types import Task

if TYPE_CHECKING:
    from sandbox_cluster.client.client import SandboxClient

EXECUTE_MARGIN_S = 12.0
"""A code action's own deadline ends it; the calls around it wait so much longer."""


TYPED_S_PER_CHAR = 0.005


@dataclass(frozen=True)
class Shot:
    """A screenshot that was decoded in full and has the desktop's size."""

    png: bytes
    width_px: int
    height_px: int
    time_s: float
    """Unix time of the capture."""
    is_settled: bool = True
    is_replay: bool = False


class Sandbox:
    """Made by SandboxClient.lease. Every method raises SandboxError (or UnknownOutcomeError) on infrastructure failure."""

    def __init__(self, client: SandboxClient, lease: Lease) -> None:
        self._client, self.lease = client, lease
        self.ended: str | None = None
        """Why the lease ended before its block, as a heartbeat learned."""

    @property
    def screen_wh_px(self) -> tuple[int, int]:
        return self.lease.screen_wh_px

    @property
    def osworld_path(self) -> str:
        """What OSWorld's client gets in place of a port: see docs/sandbox.md. A secret."""
        return f"/g/{self.lease.secret}/server"

    async def setup(self, task: Task) -> SetupReply:
        """Run the task's config steps; local files travel inside."""
        steps = await asyncio.to_thread(lambda: tuple(inline_files(dict(step)) for step in task.config))
        timeout_s = self._client.config.setup_timeout_s
        body = SetupRequest(config=steps, task_id=task.id, timeout_s=timeout_s)
        return await self._client.call(SetupReply, self._path("setup"), body, timeout_s + 5.0)

    async def step(self, actions: Sequence[GuiAction], action_id: str | None = None) -> Shot:
        """Play GUI actions, settle, screenshot. A known `action_id` gives the first result and plays nothing."""
        config = self._client.config
        body = StepRequest(
            action_id=action_id or uuid.uuid4().hex,
            actions=tuple(actions),
            settle=Settle(quiet_ms=config.settle_quiet_ms, max_ms=config.settle_max_ms),
        )
        timeout_s = config.step_timeout_s + _asked_s(actions)
        reply = await self._client.call(StepReply, self._path("step"), body, timeout_s)
        try:
            png = base64.b64decode(reply.png_base64, validate=True)
        except binascii.Error as error:
            raise SandboxError(f"the screenshot is not base64: {error}") from None
        await asyncio.to_thread(checked, png, self.screen_wh_px, reply.sha256)
        return Shot(png, *self.screen_wh_px, reply.time_s, reply.is_settled, reply.is_replay)

    async def screenshot(self) -> Shot:
        """The screen as it is now."""
        png = await self._client.get(self._path("screenshot"), self._client.config.step_timeout_s)
        await asyncio.to_thread(checked, png, self.screen_wh_px)
        return Shot(png, *self.screen_wh_px, time.time())

    async def execute(
        self, action: CodeAction, action_id: str | None = None, timeout_s: float | None = None
    ) -> ExecuteReply:
        """Run code in a fresh process on the desktop. A known `action_id` gives the first result and runs nothing."""
        limit_s = timeout_s or self._client.config.execute_timeout_s
        body = ExecuteRequest(action_id=action_id or uuid.uuid4().hex, action=action, timeout_s=limit_s)
        return await self._client.call(ExecuteReply, self._path("execute"), body, limit_s + EXECUTE_MARGIN_S)

    async def read_file(self, path: str) -> bytes:
        """A file's bytes. Raises SandboxError (kind not_found) when there is none."""
        return await self._client.get(self._path(f"file?path={quote(path)}"), 60.0)

    async def evaluate(self, task: Task | dict[str, Any], last_action: str | None = None) -> EvaluateReply:
        """The judge's word on a Task or a bare evaluator: a score, or None with the reason (I8).

        `last_action`: "DONE", "FAIL", or None when the policy never ended by itself.
        """
        evaluator, task_id = (task.evaluator, task.id) if isinstance(task, Task) else (task, "")
        timeout_s = self._client.config.evaluate_timeout_s
        body = EvaluateRequest(
            task_id=task_id, evaluator=evaluator, last_action=last_action, timeout_s=timeout_s
        )
        return await self._client.call(EvaluateReply, self._path("evaluate"), body, timeout_s + 15.0)

    async def reset(self) -> None:
        """A fresh desktop under the same lease. Action ids used before stay used."""
        self.lease = await self._client.call(
            Lease, self._path("reset"), None, self._client.config.acquire_timeout_s
        )

    def _path(self, call: str) -> str:
        return f"/v1/leases/{self.lease.lease_id}/{call}"


def _asked_s(actions: Sequence[GuiAction]) -> float:
    """The time that the actions themselves take: a policy that waits a minute is not an infrastructure failure."""
    return sum(
        action.time_s if action.kind == "wait" else TYPED_S_PER_CHAR * len(action.text or "")
        for action in actions
    )
