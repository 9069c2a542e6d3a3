"""Where scripts/bench_train.py is: a line a phase with the seconds so far, and a deadline for each.

The first forward and backward compile and tune kernels for minutes, where a compiler or a kernel may hang. So each layer is a phase
there, and a phase that takes too long ends the process, with a sentence and the stacks of its threads.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

GRACE_S = 3.0
"""What holds Python's lock keeps the watching thread from ending the process; so long after the deadline faulthandler does."""


class Phases:
    """Says on standard error which phase begins and every few seconds that it still lasts; ends a process that overruns one."""

    def __init__(self, rank: int, limit_s: float, beat_s: float = 20.0) -> None:
        """limit_s: of a phase. beat_s: between two lines of a phase that lasts."""
        self.hint = ""
        """Said when a phase overruns: how to go on."""
        self._rank, self._limit_s, self._beat_s = rank, limit_s, beat_s
        self._started = time.monotonic()
        self._phase = ("start", self._started)
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="phases", daemon=True).start()

    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def mark(self, what: str) -> None:
        """The phase `what` begins, and with it its time."""
        self._phase = (what, time.monotonic())
        faulthandler.dump_traceback_later(self._limit_s + GRACE_S, exit=True)
        self._say(what)

    def close(self) -> None:
        """No more deadlines."""
        self._is_over.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        told_s = 0.0
        while not self._is_over.wait(min(self._beat_s, self._limit_s) / 4):
            what, began = self._phase
            lasted_s = time.monotonic() - began
            if lasted_s >= self._limit_s:
                self._say(f"{what}: not done within --phase-s = {self._limit_s:g}. {self.hint}")
                faulthandler.dump_traceback(all_threads=True)
                os._exit(1)
            if lasted_s >= self._beat_s and time.monotonic() - told_s >= self._beat_s:
                told_s = time.monotonic()
                self._say(f"still {what}: {lasted_s:.0f} of at most {self._limit_s:g} s")

    def _say(self, line: str) -> None:
        print(f"[{self.seconds():6.1f} s, rank {self._rank}] {line}", file=sys.stderr, flush=True)


@contextmanager
def layers_marked(layers: Iterable[Any], mark: Callable[[str], None]) -> Iterator[None]:
    """Inside, `mark` is called when forward and backward come to each of `layers`; under recompute, forward comes twice."""

    def enter(name: str) -> Any:
        return lambda *ignored: mark(f"forward of {name}")

    def leave(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: mark(f"backward of {name}"))

        return hook

    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            name = f"layer {number}"
            stack.callback(layer.register_forward_pre_hook(enter(name)).remove)
            stack.callback(layer.register_forward_hook(leave(name)).remove)
        yield
