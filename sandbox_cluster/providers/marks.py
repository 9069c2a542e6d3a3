"""Whose a sandbox process is, written into its environment, so that a host's next life finds what nothing else tells of.

bubblewrap's child asks to die with its parent only after the parent has prepared it. A parent killed before that leaves a child
that waits for ever, recorded nowhere. Programs inside do not see the mark of a desktop: their environment is cleared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "SLIME_CUA_HOST_MARK"


def set_mark(label: str, state_dir: Path) -> str:
    """This process's mark from now on: the same for every life of the host agent `label` with that state folder."""
    mark = hashlib.sha256(f"{label}@{state_dir.resolve()}".encode()).hexdigest()[:24]
    os.environ[VARIABLE] = mark
    return mark


def marked(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a sandbox's outermost program, with this process's mark if it has one."""
    mark = os.environ.get(VARIABLE)
    return {**environment, VARIABLE: mark} if mark else dict(environment)


def end_marked(mark: str) -> int:
    """Kill every other process that carries the mark; how many. For the start of a life: nothing of ours runs yet."""
    wanted = f"{VARIABLE}={mark}".encode()
    num_ended = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
                num_ended += 1
    return num_ended
