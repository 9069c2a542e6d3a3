"""The warm pool of a host: spare desktops ready, used ones replaced in the background, failing slots set aside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_cluster.errors import ApiError
from sandbox_cluster.providers.base import SandboxProvider
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.serving import event
from slime_cua.core.errors import SandboxError

MIN_FREE_DISK_BYTES = 200 << 20
"""With less free on the disk of its state a host boots no desktop."""
HEALTH_WINDOW = 5
HEALTH_FAILURES = 3
"""So many failed looks of the last HEALTH_WINDOW make a desktop unhealthy: one missed answer does not."""
LOOK_AGAIN_S = 1.0
"""After a bad look the next one comes so soon."""
QUARANTINE_AFTER = 3
"""Desktops of a slot in a row that did not boot, or ended before anybody had them."""
QUARANTINE_S = 30.0
MAX_QUARANTINE_S = 120.0
BACKOFF_S = 0.5


@dataclass
class Slot:
    number: int
    is_used: bool = False
    num_failures: int = 0
    not_before_mono: float = 0.0

    def failed(self) -> None:
        self.num_failures += 1
        over = self.num_failures - QUARANTINE_AFTER
        wait_s = BACKOFF_S if over < 0 else min(MAX_QUARANTINE_S, QUARANTINE_S * 2**over)
        self.not_before_mono = time.monotonic() + wait_s


@dataclass
class Watched:
    """A desktop under supervision."""

    desktop: Desktop
    looks: deque[bool] = field(default_factory=lambda: deque(maxlen=HEALTH_WINDOW))
    last_good_mono: float = field(default_factory=time.monotonic)
    num_busy: int = 0
    """Calls that run: their own deadlines watch over the desktop meanwhile, and a look would wait behind them."""

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """No looks inside the block; its end without an error counts as a good one."""
        self.num_busy += 1
        try:
            yield
            self.note(True)
        finally:
            self.num_busy -= 1

    def note(self, is_good: bool) -> None:
        self.looks.append(is_good)
        if is_good:
            self.last_good_mono = time.monotonic()

    @property
    def is_unhealthy(self) -> bool:
        return not self.desktop.is_alive or self.looks.count(False) >= HEALTH_FAILURES


class Pool:
    """At most `num_desktops` + `num_spares` desktops, of which `num_spares` wait ready."""

    def __init__(
        self,
        provider: SandboxProvider,
        num_desktops: int,
        num_spares: int,
        *,
        health_interval_s: float = 5.0,
        look_timeout_s: float = 10.0,
        min_free_disk_bytes: int = MIN_FREE_DISK_BYTES,
        min_free_memory_bytes: int = 256 << 20,
        disk: Path = Path("/tmp"),
    ) -> None:
        self.last_error = ""
        self._provider, self._num_spares = provider, num_spares
        self._slots = [Slot(number) for number in range(num_desktops + num_spares)]
        self._health_interval_s, self._look_timeout_s = health_interval_s, look_timeout_s
        self._floors = (min_free_disk_bytes, min_free_memory_bytes, disk)
        self.on_change: Callable[[], None] = lambda: None
        self._ready: deque[Watched] = deque()
        self._taken: dict[int, Watched] = {}
        self._num_booting = 0
        self._waiters: deque[asyncio.Future[Watched]] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._num_black_before = 0

    @property
    def num_black_captures(self) -> int:
        """Screens that stayed black, of all desktops of this host since it started."""
        living = (*self._ready, *self._taken.values())
        return self._num_black_before + sum(one.desktop.num_black_captures for one in living)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def start(self) -> None:
        self._spawn(self._keep())

    async def close(self) -> None:
        """End all desktops."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for waiter in self._waiters:
            waiter.cancel()
        await self._provider.close()

    async def take(self, wait_s: float) -> Watched:
        """A clean desktop, first come first served. Raises ApiError `unavailable` after wait_s."""
        while self._ready:
            watched = self._ready.popleft()
            if watched.desktop.is_alive:
                self._hand_out(watched)
                self._refill()
                return watched
            self._drop_spare(watched)
        waiter: asyncio.Future[Watched] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._refill()
        try:
            async with asyncio.timeout(wait_s):
                return await waiter
        except TimeoutError:
            if _has_result(waiter):
                return waiter.result()
            why = f": {self.last_error}" if self.last_error else ""
            raise ApiError("unavailable", f"no desktop was ready within {wait_s:g} s{why}") from None
        except asyncio.CancelledError:
            if _has_result(waiter):
                self.give_back(waiter.result())
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def give_back(self, watched: Watched) -> None:
        """A used desktop: it is ended, its slot freed, a fresh one boots. Nothing is used twice."""
        self._taken.pop(watched.desktop.slot, None)
        self._drop(watched)

    def _hand_out(self, watched: Watched) -> None:
        slot = self._slots[watched.desktop.slot]
        slot.num_failures = 0
        self._taken[slot.number] = watched

    def _drop_spare(self, watched: Watched) -> None:
        """One that ended before anybody had it: a slot whose desktops boot and die would do so for ever."""
        slot = self._slots[watched.desktop.slot]
        slot.failed()
        self.last_error = f"the desktop of slot {slot.number} ended before it was used"
        event("spare_unhealthy", slot=slot.number, in_a_row=slot.num_failures)
        self._drop(watched)

    def _drop(self, watched: Watched) -> None:
        self._num_black_before += watched.desktop.num_black_captures
        self._spawn(self._end(watched.desktop))

    async def _end(self, desktop: Desktop) -> None:
        await desktop.kill()
        self._slots[desktop.slot].is_used = False
        self._refill()

    def _refill(self) -> None:
        if self._is_closed:
            return
        missing = self._num_spares + len(self._waiters) - len(self._ready) - self._num_booting
        now = time.monotonic()
        for slot in self._slots:
            if missing <= 0:
                return
            if not slot.is_used and now >= slot.not_before_mono and self._has_floors():
                slot.is_used = True
                self._num_booting += 1
                missing -= 1
                self._spawn(self._boot(slot))

    async def _boot(self, slot: Slot) -> None:
        try:
            desktop = await self._provider.boot(slot.number)
        except (SandboxError, OSError) as error:
            slot.failed()
            slot.is_used = False
            self.last_error = f"boot of slot {slot.number} failed: {error}"
            event("boot_failed", slot=slot.number, in_a_row=slot.num_failures, error=str(error))
            return
        finally:
            self._num_booting -= 1
        self._offer(Watched(desktop))

    def _offer(self, watched: Watched) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._hand_out(watched)
                waiter.set_result(watched)
                return
        self._ready.append(watched)
        self.on_change()

    async def _keep(self) -> None:
        """Refill, and look at desktops that nobody used for a while."""
        while True:
            await asyncio.sleep(min(0.5, self._health_interval_s))
            for watched in [one for one in self._ready if one.is_unhealthy]:
                self._ready.remove(watched)
                self._drop_spare(watched)
            edge = time.monotonic() - self._health_interval_s
            for one in (*self._ready, *self._taken.values()):
                if one.last_good_mono < edge and not one.num_busy:
                    self._spawn(self._look(one))
            self._refill()

    async def _look(self, watched: Watched) -> None:
        if not watched.desktop.is_alive:
            return
        try:
            with watched.busy():
                async with asyncio.timeout(self._look_timeout_s):
                    await watched.desktop.screenshot()
        except (SandboxError, TimeoutError):
            watched.note(False)
            watched.last_good_mono = time.monotonic() - self._health_interval_s + LOOK_AGAIN_S

    def _has_floors(self) -> bool:
        disk_bytes, memory_bytes, disk = self._floors
        stat = os.statvfs(disk)
        if stat.f_bavail * stat.f_frsize < disk_bytes:
            self.last_error = f"no desktop is booted: less than {disk_bytes >> 20} MiB are free in {disk}"
            return False
        if _available_memory_bytes() < memory_bytes:
            self.last_error = (
                f"no desktop is booted: less than {memory_bytes >> 20} MiB of memory are available"
            )
            return False
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            event("pool_task_failed", error=repr(task.exception()))


def _available_memory_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 1 << 62


def _has_result(waiter: asyncio.Future[Watched]) -> bool:
    """True when a desktop was handed over in the moment in which its taker gave up."""
    return waiter.done() and not waiter.cancelled() and waiter.exception() is None
