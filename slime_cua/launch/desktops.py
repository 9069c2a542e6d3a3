"""Desktops of a run: leased from its gateway, one an episode."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout.ports import DesktopPort
from sandbox_cluster.api import Requirements
from sandbox_cluster.client import SandboxClient
from slime_cua.config.sandbox import SandboxConfig
from slime_cua.core.types import Task


class GatewayDesktops:
    """`rollout.player.Desktops` over a sandbox gateway."""

    def __init__(self, url: str, token: str, config: SandboxConfig) -> None:
        self._client = SandboxClient(url, token, config, owner=f"rollout-{secrets.token_hex(4)}")
        self._requirements = Requirements(screen_wh_px=config.screen_wh_px)

    @asynccontextmanager
    async def lease(self, task: Task, episode_id: str) -> AsyncIterator[DesktopPort]:
        """A clean desktop until the block ends. The key is fresh: an episode played again must not get the old desktop."""
        key = f"{episode_id}-{secrets.token_hex(8)}"
        async with self._client.lease(
            key=key, task_id=task.id, episode_id=episode_id, requirements=self._requirements
        ) as sandbox:
            yield sandbox

    async def close(self) -> None:
        await self._client.close()
