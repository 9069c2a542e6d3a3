"""What the person at the terminal sees: one line a phase, and progress on anything that takes longer than two seconds."""

from __future__ import annotations

import sys
import time

TTY_EVERY_S = 1.0
LOG_EVERY_S = 15.0


class Console:
    """Prints with the time since the start. Progress lines overwrite themselves on a terminal and are rare in a log."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown = 0.0
        self._is_tty = sys.stdout.isatty()
        self._is_open = False

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._is_open:
            print()
            self._is_open = False
        minutes, seconds = divmod(int(self.elapsed_s), 60)
        print(f"[{minutes:2d}:{seconds:02d}] {text}", flush=True)

    def progress(self, text: str) -> None:
        """A line that may be passed over when the last one was a moment ago."""
        now = time.monotonic()
        if now - self._shown < (TTY_EVERY_S if self._is_tty else LOG_EVERY_S):
            return
        self._shown = now
        if self._is_tty:
            minutes, seconds = divmod(int(self.elapsed_s), 60)
            print(f"\r\033[K[{minutes:2d}:{seconds:02d}] {text}", end="", flush=True)
            self._is_open = True
        else:
            self.say(text)
