"""SIGTERM and SIGHUP end a run as Ctrl-C does: through its context managers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
DEAF_S = 60.0
"""So long after a signal further ones are passed over: a second Ctrl-C does not cut the clean-up short."""


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Handlers are after the block what they were before: joining Ray puts its own, in Python and below it.

    Ray's exits on SIGTERM with its number: that leaves the block as the KeyboardInterrupt that it would have been without it.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    except SystemExit as error:
        if error.code != signal.SIGTERM:
            raise
        raise KeyboardInterrupt from error
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """KeyboardInterrupt in the main thread on SIGINT, SIGTERM and SIGHUP, for the length of the block.

    One that comes more than DEAF_S after the last is heard again: the first may have been lost in foreign code.
    """
    heard = float("-inf")

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if time.monotonic() - heard > DEAF_S:
            heard = time.monotonic()
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
