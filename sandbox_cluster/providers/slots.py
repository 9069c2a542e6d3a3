"""Which slots of a provider have a desktop, and how many boot at once: the same for every provider."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sandbox_cluster.providers.desktop import Desktop
from slime_cua.core.errors import SandboxError


class Slots:
    """One desktop a slot. Use it from one event loop."""

    def __init__(self, max_boots: int) -> None:
        self._boots = asyncio.Semaphore(max_boots)
        self._desktops: dict[int, Desktop | None] = {}
        """None while it boots."""

    async def boot(self, slot: int, make: Callable[[], Awaitable[Desktop]]) -> Desktop:
        """What `make` makes, when its turn has come. SandboxError for a slot that has one; a failed boot leaves it free."""
        if slot in self._desktops:
            raise SandboxError(f"slot {slot} has a desktop; kill it first")
        self._desktops[slot] = None
        try:
            async with self._boots:
                desktop = await make()
        except BaseException:
            self.free(slot)
            raise
        self._desktops[slot] = desktop
        return desktop

    def free(self, slot: int) -> None:
        """Its desktop is gone. May be repeated."""
        self._desktops.pop(slot, None)

    async def kill_all(self) -> None:
        await asyncio.gather(*(one.kill() for one in list(self._desktops.values()) if one is not None))
