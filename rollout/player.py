"""From a task to an episode: leases a desktop, plays, gives the desktop back. Bounded by the number of desktops.

A slot here is a promise that the gateway can serve; while an episode waits for its desktop it holds no engine and no
group waits for it longer than acquire_timeout_s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from rollout.episode import EpisodeRunner
from rollout.ports import DesktopPort, PolicyPort, Sampled
from slime_cua.core.errors import InfrastructureError
from slime_cua.core.types import Episode, ImageRef, Task

OnRequest = Callable[[], None]


class Desktops(Protocol):
    """Where desktops come from."""

    def lease(self, task: Task, episode_id: str) -> AbstractAsyncContextManager[DesktopPort]: ...


@dataclass
class Busy:
    """Integrates how many of a thing were in use, at most `capacity`; `take` gives the mean share since the last `take`."""

    capacity: int
    num_now: int = 0
    _area: float = 0.0
    _since: float = field(default_factory=time.monotonic)
    _changed: float = field(default_factory=time.monotonic)

    def add(self, change: int) -> None:
        now = time.monotonic()
        self._area += min(self.num_now, self.capacity) * (now - self._changed)
        self._changed = now
        self.num_now += change

    def take(self) -> float:
        self.add(0)
        share = self._area / max(1e-9, (self._changed - self._since) * self.capacity)
        self._area, self._since = 0.0, self._changed
        return share


@dataclass
class WatchedPolicy:
    """A policy whose requests are counted: with capacity 1, `busy` is the time with at least one under way."""

    policy: PolicyPort
    busy: Busy

    async def generate(
        self, prompt_ids: Sequence[int], images: Sequence[tuple[ImageRef, bytes]], *, session: str
    ) -> Sampled:
        self.busy.add(1)
        try:
            return await self.policy.generate(prompt_ids, images, session=session)
        finally:
            self.busy.add(-1)


@dataclass
class Player:
    """Plays episodes of one run against its engines and desktops."""

    runner: EpisodeRunner
    desktops: Desktops
    num_desktops: int
    busy: Busy = field(init=False)
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.busy = Busy(self.num_desktops)
        self._slots = asyncio.Semaphore(self.num_desktops)

    async def play(
        self,
        task: Task,
        policy: PolicyPort,
        *,
        group_id: str,
        episode_id: str,
        on_request: OnRequest = lambda: None,
    ) -> Episode:
        """The episode; an unavailable desktop makes it invalid, it never raises for that."""
        started_s, began = time.time(), time.monotonic()
        async with self._slots:
            self.busy.add(1)
            try:
                async with self.desktops.lease(task, episode_id) as desktop:
                    return await self.runner.run(
                        task,
                        desktop,
                        policy,
                        episode_id=episode_id,
                        group_id=group_id,
                        on_request=on_request,
                    )
            except InfrastructureError as error:
                return Episode(
                    episode_id=episode_id,
                    group_id=group_id,
                    task_id=task.id,
                    turns=(),
                    stop_reason="invalid",
                    error=f"{type(error).__name__}: {error}",
                    started_s=started_s,
                    ended_s=started_s + time.monotonic() - began,
                )
            finally:
                self.busy.add(-1)
