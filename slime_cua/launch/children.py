"""Nothing that a command started outlives it: what its own cleanup forgot is found by descent, never by name."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandbox_cluster.host.orphans import adopting_orphans


@contextmanager
def no_child_left(grace_s: float = 3.0) -> Iterator[None]:
    """At the end of the block, descendants that it added get SIGTERM and, after `grace_s`, SIGKILL.

    Inside, orphans among the descendants come to this process instead of init (Linux), so that none is lost.
    """
    with adopting_orphans():
        before = set(descendants())
        try:
            yield
        finally:
            end(before, grace_s)


def end(spared: set[int], grace_s: float) -> int:
    """End all descendants but `spared`; how many were still there."""
    left = _living(spared)
    num_left = len(left)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + grace_s
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = _living(spared)
    return num_left


def descendants(root: int | None = None) -> list[int]:
    """Process ids below `root` (default: this process), children before their own children."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(path.name))
    found: list[int] = []
    waiting = [root or os.getpid()]
    while waiting:
        children = parents.get(waiting.pop(0), [])
        found += children
        waiting += children
    return found


def _living(spared: set[int]) -> list[int]:
    """Descendants that run; ended ones are collected."""
    alive = []
    for pid in descendants():
        if pid in spared:
            continue
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                alive.append(pid)
                continue
        with contextlib.suppress(ChildProcessError, OSError):
            os.waitpid(pid, os.WNOHANG)
    return alive
