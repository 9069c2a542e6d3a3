"""What the person at the terminal sees: one line a phase, and progress on anything that takes longer than two seconds."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TTY_EVERY_S = 1.0
LOG_EVERY_S = 15.0


class _QuietFile(logging.FileHandler):
    """A log that cannot be written, on a full disk say, is no reason for tracebacks at the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:
        return


class Console:
    """Prints with the time since the start. Progress lines overwrite themselves on a terminal and are rare in a log.

    `record` keeps every line, progress too, in a file, so that somebody else can see where the run is.
    """

    def __init__(self) -> None:
        self._log: logging.Logger | None = None
        self._start = time.monotonic()
        self._shown = 0.0
        self._is_tty = sys.stdout.isatty()
        self._is_open = False

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @contextlib.contextmanager
    def record(self, path: Path) -> Iterator[None]:
        """Lines go to the file `path`, too, with the warnings of our packages, for the length of the block."""
        handler = _QuietFile(path)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._log = logging.getLogger("slime_cua.console")
        self._log.setLevel(logging.INFO)
        loggers = [logging.getLogger(name) for name in ("slime_cua", "rollout", "sandbox_cluster")]
        for logger in loggers:
            logger.addHandler(handler)
        try:
            yield
        finally:
            self._log = None
            for logger in loggers:
                logger.removeHandler(handler)
            handler.close()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._keep(text)
        self._print(text)

    def _keep(self, text: str) -> None:
        if self._log is not None:
            self._log.info(text)

    def _print(self, text: str) -> None:
        if self._is_open:
            print()
            self._is_open = False
        minutes, seconds = divmod(int(self.elapsed_s), 60)
        print(f"[{minutes:2d}:{seconds:02d}] {text}", flush=True)

    def progress(self, text: str) -> None:
        """A line that may be passed over when the last one was a moment ago."""
        self._keep(text)
        now = time.monotonic()
        if now - self._shown < (TTY_EVERY_S if self._is_tty else LOG_EVERY_S):
            return
        self._shown = now
        if self._is_tty:
            minutes, seconds = divmod(int(self.elapsed_s), 60)
            print(f"\r\033[K[{minutes:2d}:{seconds:02d}] {text}", end="", flush=True)
            self._is_open = True
        else:
            self._print(text)
