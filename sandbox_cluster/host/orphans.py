"""The host agent collects what is left when a sandbox ends.

bubblewrap's outer process leaves as soon as its program has ended, or is killed; the first process inside is then an orphan for a
moment. Whoever adopts it must collect it, or it stays a zombie and counts against the process limit of its desktop's user, until
no desktop boots. init does that, many a container's pid 1 and a driver that is a subreaper do not: so the agent adopts its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
EVERY_S = 1.0


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """In the block, orphans among our descendants come to this process (Linux; elsewhere nothing happens)."""
    was_on = ctypes.c_int(0)
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(was_on), 0, 0, 0)
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, was_on.value, 0, 0, 0)


async def collect_orphans() -> None:
    """Until cancelled. A child that is still a zombie at the second look has nobody who waits for it."""
    seen: set[int] = set()
    while True:
        await asyncio.sleep(EVERY_S)
        zombies = set(zombie_children())
        _collect(zombies & seen)
        seen = zombies - seen


def _collect(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.waitpid(pid, os.WNOHANG)


def zombie_children() -> list[int]:
    """Children of this process that have ended and were not collected."""
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in children.read_text().split()]
    return [pid for pid in found if _is_zombie(pid)]


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
