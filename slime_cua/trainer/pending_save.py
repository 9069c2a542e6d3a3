"""A checkpoint that is being written in a thread while training goes on."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


class PendingSave:
    """`work` in a thread of its own. Whoever waits gets its error."""

    def __init__(self, path: Path, work: Callable[[], None]) -> None:
        self.path = path
        """Where the checkpoint will be."""
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=False)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Written, or failed: `wait` says which."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """The whole checkpoint's folder. Raises CheckpointError when it could not be written."""
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self.path

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error


def make_writers_group(timeout_s: float) -> Any:
    """A gloo group of all ranks for the writing thread alone: collectives of two threads in one group would mix. A collective."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
