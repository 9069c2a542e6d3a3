"""Cleans up after a driver that was killed: whatever still runs with the run's mark in its environment is ended.

    with guarded():        the mark is in os.environ: everything started inside inherits it
        ...

The guardian is a process of its own with nothing but the standard library; it waits on a pipe that only the driver holds.
When the driver has gone, in whatever way, it gives the others a moment (most notice by themselves), ends the rest by process
id, and removes the folders that were given to it. It needs no name patterns: the mark is random and of this run alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "SLIME_CUA_RUN_MARK"
NOTICE_S = 2.0
"""Processes that end with the driver by themselves get so long."""
TERM_S = 4.0
"""Between SIGTERM and SIGKILL."""


class Guardian:
    """What the driver holds of its guardian."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        environment = {key: value for key, value in os.environ.items() if key != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve()), self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def remove_later(self, folder: Path) -> None:
        """`folder` is removed when the driver has gone, if it is still there."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{folder}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Let it do its work now; returns when nothing with the mark is left."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(NOTICE_S + 2 * TERM_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def guarded() -> Iterator[Guardian]:
    """A guardian for the length of the block, and its mark in the environment of all that is started inside."""
    guardian = Guardian()
    before = os.environ.get(MARK)
    os.environ[MARK] = guardian.mark
    try:
        yield guardian
    finally:
        if before is None:
            os.environ.pop(MARK, None)
        else:
            os.environ[MARK] = before
        guardian.close()


def marked(mark: str) -> list[int]:
    """Processes that were started with the mark and have not ended."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
    return found


def watch(mark: str) -> None:
    """The guardian's life: folders, one a line, until the pipe ends; then clean up."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    folders = [Path(line.rstrip("\n")) for line in sys.stdin]
    steps: list[tuple[int, float]] = [(0, NOTICE_S), (signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)]
    for number, wait_s in steps:
        end = time.monotonic() + wait_s
        for pid in marked(mark) if number else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        while marked(mark) and time.monotonic() < end:
            time.sleep(0.05)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1])
