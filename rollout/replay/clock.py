"""An asyncio loop whose clock jumps to the next timer: hours of waiting cost only what the code between the waits costs."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stalled(RuntimeError):
    """Nothing is ready and no timer runs: on a real clock the program would wait for ever."""


class _Jumping(selectors.SelectSelector):
    """Never waits: moves the loop's clock by the time that it was asked to wait."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stalled("every task waits and no timer runs: the schedule is deadlocked")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sockets, threads and subprocesses do not work on it; everything that waits by loop.time() does."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now_s


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """What `main` returns, run on a fresh virtual clock. Raises Stalled when it waits for nothing."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
