"""Symptom: attention dies with CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED, or its gradients are NaN, where a machine has a cuDNN besides
         the one that torch brought.
Upstream: transformer_engine 2.11.0 common/__init__.py, _load_cuda_library.
Why:      it looks for cuDNN in the system before Python's packages, so a process holds two releases and one finds the other's
          parts. CUDNN_HOME is asked first: it is set to torch's. Who has set it is left alone.
Remove when: Transformer Engine takes the cuDNN that is loaded.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from megatron_patches import te_standin
from megatron_patches.registry import Patch


def folder_of_torch() -> Path | None:
    """Where the wheel that torch depends on keeps cuDNN; None for a torch that uses the system's."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place) / "cudnn"
        if any(folder.glob("lib/libcudnn.so*")):
            return folder
    return None


def is_needed() -> bool:
    """With Transformer Engine, before it is imported."""
    return not te_standin.is_missing() and "CUDNN_HOME" not in os.environ and folder_of_torch() is not None


def install() -> None:
    """Name torch's cuDNN to Transformer Engine, here and in processes that are started from here."""
    os.environ["CUDNN_HOME"] = str(folder_of_torch())


PATCH = Patch(
    name="one_cudnn",
    phase="before_import",
    symptom="Transformer Engine loads the system's cuDNN beside torch's; it is shown torch's",
    install=install,
    is_needed=is_needed,
)
