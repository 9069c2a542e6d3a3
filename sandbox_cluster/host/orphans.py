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
import signal
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
    """Until cancelled. A child that is still a zombie at the second look has nobody who waits for it; one that is the first
    process of a sandbox and a child of ours has lost its parent before it could ask to die with it, and is ended."""
    seen: set[int] = set()
    try:
        while True:
            await asyncio.sleep(EVERY_S)
            _end(stranded_children())
            zombies = set(zombie_children())
            _collect(zombies & seen)
            seen = zombies - seen
    finally:
        _end(stranded_children())


def _collect(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.waitpid(pid, os.WNOHANG)


def _end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def zombie_children() -> list[int]:
    """Children of this process that have ended and were not collected."""
    return [pid for pid in _children() if _is_zombie(pid)]


def stranded_children() -> list[int]:
    """Adopted first processes of sandboxes: those we start ourselves are in our own process namespace."""
    return [pid for pid in _children() if _is_first_of_a_namespace(pid) and not _is_zombie(pid)]


def _children() -> list[int]:
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in children.read_text().split()]
    return found


def _is_first_of_a_namespace(pid: int) -> bool:
    depth = len(_namespace_pids("self"))
    numbers = _namespace_pids(str(pid))
    return len(numbers) > depth and numbers[depth] == "1"


def _namespace_pids(name: str) -> list[str]:
    """Numbers of a process from ours inwards; none when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{name}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return line.split()[1:]
    return []


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
