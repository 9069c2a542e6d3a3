"""Symptom: where a machine has a cuDNN besides the one that torch brought, Transformer Engine does not import (an undefined symbol
         of libcudnn_graph.so.9) or its attention dies with CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED.
Upstream: transformer_engine 2.11.0 common/__init__.py, _load_cuda_library.
Why:      it looks for cuDNN in the system before Python's packages, and its own library names cuDNN's parts without a place, so a
          process gets parts of two releases. CUDNN_HOME, which is asked first, is set to torch's, and all parts of torch's are
          loaded before: a part that is there is not looked for again. Who has set CUDNN_HOME to another is left alone.
Remove when: Transformer Engine takes the cuDNN that is loaded.
"""

from __future__ import annotations

import ctypes
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
    if te_standin.is_missing():
        return False
    folder = folder_of_torch()
    return folder is not None and os.environ.get("CUDNN_HOME", str(folder)) == str(folder)


def install() -> None:
    """Name torch's cuDNN to Transformer Engine, here and in processes that are started from here, and load its parts here."""
    folder = folder_of_torch()
    assert folder is not None
    os.environ["CUDNN_HOME"] = str(folder)
    for library in sorted(folder.glob("lib/libcudnn*.so*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


PATCH = Patch(
    name="one_cudnn",
    phase="before_import",
    symptom="Transformer Engine loads the system's cuDNN beside torch's; it is shown torch's",
    install=install,
    is_needed=is_needed,
)
