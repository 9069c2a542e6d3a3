"""A checkpoint that is being written in a thread while training goes on."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slime_cua.trainer import progress

POLL_S = 0.5
"""Between two looks at how much is written."""


class PendingSave:
    """`work` in a thread of its own. Whoever waits gets its error."""

    def __init__(self, path: Path, work: Callable[[], None], draft: Path) -> None:
        """path: where the checkpoint will be. draft: the folder that it is written in."""
        self.path, self._draft = path, draft
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=False)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Written, or failed: `wait` says which."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """The whole checkpoint's folder. Raises CheckpointError when it could not be written.

        While the draft grows this rank makes progress (slime_cua.trainer.progress): a large one is not taken for a hang.
        """
        num_bytes = -1
        while self._thread.is_alive():
            before, num_bytes = num_bytes, _folder_bytes(self._draft)
            if num_bytes != before:
                progress.mark(f"writing {self.path.name}: {num_bytes} bytes")
            self._thread.join(POLL_S)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self.path

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error


def _folder_bytes(folder: Path) -> int:
    """Of its files; a folder that is moved or removed meanwhile counts what was seen of it."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            total += path.stat().st_size
    return total


def make_writers_group(timeout_s: float) -> Any:
    """A gloo group of all ranks for the writing thread alone: collectives of two threads in one group would mix. A collective."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
