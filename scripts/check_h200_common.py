"""What the parts of check_h200 share: rows of the report, the deadline, child processes that do not outlive it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_tables import Row

from slime_cua.core.errors import SlimeCuaError

ROOT = Path(__file__).resolve().parents[1]
MARK = "SLIME_CUA_CHECK_MARK"
"""In the environment of every process that a Child starts, however deep."""

DYING_S = 5.0
"""A killed process is gone by then, its memory given back."""


class PartFailed(SlimeCuaError):
    """A part cannot go on; the text says why."""


def holds(name: str, value: str, is_met: bool, goal: str = "yes") -> Row:
    """Something that must be so."""
    return Row(name, value, goal, is_met)


@dataclass
class Check:
    """What was asked for, and until when the part at work may take."""

    gpus: int
    folder: Path
    parts: Sequence[str]
    python: str
    is_cpu: bool = False
    device: str = "CPU rank"
    gateway: str = ""
    model: Path = ROOT / "models/tiny_base"
    has_cold_start: bool = True
    """The model knows no task yet: the run teaches it first."""
    patience_s: float = 30.0
    """A child that was told to end has so long."""
    end_s: float = 0.0
    """Of the part at work, on the monotonic clock."""
    tables: dict[str, str] = field(default_factory=dict)
    """Markdown below the report, by part."""
    children: list[Child] = field(default_factory=list)
    run: Any = None
    """The live run, where a part has started one."""

    def left_s(self) -> float:
        """Seconds until the part's deadline."""
        return self.end_s - time.monotonic()

    def start(self, name: str, command: Sequence[str], **environment: str) -> Child:
        """Our interpreter with `command`, in a session of its own; output into FOLDER/logs/NAME.log."""
        child = Child(self.folder / f"logs/{name}.log", [self.python, *command], environment)
        self.children.append(child)
        return child

    def finish(self, child: Child) -> str:
        """What a child printed. Raises PartFailed when it fails, or has not ended at the part's deadline."""
        try:
            code = child.process.wait(max(0.0, self.left_s()))
        except subprocess.TimeoutExpired:
            child.end(self.patience_s)
            raise PartFailed(f"not done within the part's time; see {child.log}") from None
        if code:
            raise PartFailed(f"ended with code {code}: {child.last_words()}; see {child.log}")
        return child.log.read_text(errors="replace")

    def close(self) -> None:
        """End every child that still runs."""
        for child in self.children:
            child.end(self.patience_s)
        self.children.clear()


class Child:
    """A process group with a log. `mark` finds all that it started, also in other sessions."""

    def __init__(self, log: Path, command: Sequence[str], environment: dict[str, str]) -> None:
        self.log, self.mark = log, secrets.token_hex(8)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **environment, MARK: self.mark},
                start_new_session=True,
            )

    def end(self, patience_s: float) -> int:
        """Ask it to end as Ctrl-C does, then kill what is left; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        end = time.monotonic() + patience_s / 2
        while self.pids() and self.process.poll() is not None and time.monotonic() < end:
            time.sleep(0.2)  # what it left behind notices by itself
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        code = self.process.wait()
        end = time.monotonic() + DYING_S
        while self.pids() and time.monotonic() < end:
            time.sleep(0.02)
        return code

    def pids(self, words: str = "", but: str = "\0\0") -> list[int]:
        """Processes of the child whose command line holds `words` and not `but`, oldest first."""
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if f"{MARK}={self.mark}".encode() not in (path / "environ").read_bytes():
                    continue
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (path / "stat").read_text().rpartition(")")[2].split()
                if words in line and but not in line and state[0] not in "ZX":
                    found.append((int(state[19]), int(path.name)))
        return [pid for _, pid in sorted(found)]

    def last_words(self) -> str:
        """The sentence that it ended with, or its last line."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or ["(it said nothing)"])[-1][:300]


def waiting(check: Check, child: Child, what: str, every_s: float = 0.5) -> Iterator[None]:
    """Comes back until the caller has seen what it waits for. Raises PartFailed at the deadline, or when the child has ended."""
    while True:
        yield
        if child.process.poll() is not None:
            raise PartFailed(f"it ended before {what}: {child.last_words()}; see {child.log}")
        if check.left_s() < 0:
            raise PartFailed(f"no {what} within the part's time; see {child.log}")
        time.sleep(every_s)
