"""Symptom: a rank imports wandb, datasets, pandas and pyarrow, half a second and 100 MB, and uses none of them.
Upstream: megatron-core 0.16.1 core/inference (asks whether wandb is there), mcore_bridge 1.6.5 utils/torch_utils.py (a file lock
          from datasets).
Why:      for the time of that import wandb is not there, which Megatron is ready for, and the lock comes from filelock, which
          datasets takes it from. Metrics are the driver's. Afterwards all of them can be imported as before.
Remove when: both import them where they use them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from filelock import FileLock

from megatron_patches.standin_modules import add_module

LOCK_MODULES = ("datasets", "datasets.utils", "datasets.utils.filelock")


@contextlib.contextmanager
def light_imports() -> Iterator[None]:
    """Inside, wandb is missing and datasets is its lock; what the process has imported already stays as it is."""
    hidden = []
    if "wandb" not in sys.modules:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # what Python documents: an import of it fails
        hidden.append("wandb")
    if "datasets" not in sys.modules:
        for name in LOCK_MODULES:
            add_module(name, FileLock=FileLock)
        hidden += LOCK_MODULES
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
