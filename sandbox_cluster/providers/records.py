"""What a provider writes down about each running desktop, so that its next life can end what this one left.

A process is known by pid and start time: a reused pid is somebody else and is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from sandbox_cluster.providers.limits import remove_groups
from slime_cua.core.errors import SandboxError
from slime_cua.core.files import write_atomic


@dataclass(frozen=True)
class DesktopRecord:
    """One running desktop: its outermost process and its groups."""

    slot: int
    pid: int
    start_ticks: int
    """Start time of the process in clock ticks since boot (/proc/PID/stat, field 22)."""
    boot_id: str
    groups: tuple[str, ...]


class Records:
    """The records of one label in `state_dir`; one living owner at a time, kept by a file lock."""

    def __init__(self, state_dir: Path, label: str) -> None:
        if not label or not all(char.isalnum() or char in "-_." for char in label) or label.startswith("."):
            raise ValueError(
                f"label {label!r} must be letters, digits, '-', '_' and '.', not starting with '.'"
            )
        self._folder = state_dir / "desktops" / label
        self._lock: IO[str] | None = None

    def own(self) -> None:
        """Take the lock, once. SandboxError when another living process has it."""
        if self._lock is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        file = (self._folder / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise SandboxError(
                f"another running process owns the desktops in {self._folder}; end it or take another label"
            ) from None
        self._lock = file

    def release(self) -> None:
        """Give the lock back. May be repeated."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write(self, slot: int, pid: int, groups: tuple[Path, ...]) -> None:
        ticks = start_ticks(pid)
        record = DesktopRecord(slot, pid, ticks or 0, boot_id(), tuple(str(group) for group in groups))
        write_atomic(self._path(slot), json.dumps(asdict(record)).encode())

    def remove(self, slot: int) -> None:
        self._path(slot).unlink(missing_ok=True)

    def reap(self, timeout_s: float = 5.0) -> int:
        """End every recorded desktop; how many still ran. Call it when no desktop of this life runs."""
        self.own()
        num_ended = 0
        for path in sorted(self._folder.glob("slot-*.json")):
            try:
                record = DesktopRecord(**json.loads(path.read_bytes()))
            except (ValueError, TypeError):
                path.unlink(missing_ok=True)
                continue
            if record.boot_id == boot_id():
                num_ended += _end(record.pid, record.start_ticks, timeout_s)
                remove_groups(tuple(Path(group) for group in record.groups))
            path.unlink(missing_ok=True)
        return num_ended

    def _path(self, slot: int) -> Path:
        return self._folder / f"slot-{slot}.json"


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, or None when there is none (an ended one not collected yet counts as none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def boot_id() -> str:
    """Changes with every start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _end(pid: int, ticks: int, timeout_s: float) -> bool:
    if start_ticks(pid) != ticks:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while start_ticks(pid) == ticks and time.monotonic() < deadline:
        time.sleep(0.005)
    return True
