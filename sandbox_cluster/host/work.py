"""What a host does with a leased desktop beside actions: set-up, evaluation, OSWorld's endpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from sandbox_cluster.api import EvaluateReply, EvaluateRequest, SetupReply, SetupRequest
from sandbox_cluster.judge.evaluate import evaluate
from sandbox_cluster.judge.jail import Jail
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.tasks.setup import Setup


class Work:
    """Set-up and judging of one host."""

    def __init__(
        self,
        jail: Jail,
        password: str,
        allowed_urls: tuple[str, ...] = (),
        downloads: Path | None = None,
    ) -> None:
        """password: what set-up steps put for {CLIENT_PASSWORD}."""
        self._servers: WeakKeyDictionary[Desktop, Any] = WeakKeyDictionary()
        self._jail = jail
        self._setup = Setup(self.server, allowed_urls, password, downloads)

    async def setup(self, desktop: Desktop, request: SetupRequest, timeout_s: float) -> SetupReply:
        """Raises TaskError, SandboxError."""
        return SetupReply(
            seconds=await self._setup.run(desktop, request.config, min(timeout_s, request.timeout_s))
        )

    async def evaluate(self, desktop: Desktop, request: EvaluateRequest, timeout_s: float) -> EvaluateReply:
        """A score or the reason why there is none; nothing is raised."""
        limit_s = min(timeout_s, request.timeout_s)
        try:
            async with asyncio.timeout(limit_s + 1.0):
                return await evaluate(desktop, request, self._jail, self._setup, limit_s)
        except TimeoutError:
            return EvaluateReply(
                score=None, invalid_reason=f"the evaluation did not end within {limit_s:.1f} s"
            )

    def server(self, desktop: Desktop) -> Any:
        """The desktop's OSWorld endpoints as an ASGI application."""
        if desktop not in self._servers:
            from sandbox_cluster.guest.forward import application

            self._servers[desktop] = application(desktop)
        return self._servers[desktop]
