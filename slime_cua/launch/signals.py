"""SIGTERM and SIGHUP end a run as Ctrl-C does: through its context managers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """KeyboardInterrupt in the main thread on SIGTERM and SIGHUP, for the length of the block. A second one is passed over."""
    is_ending = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_ending
        if not is_ending:
            is_ending = True
            raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
