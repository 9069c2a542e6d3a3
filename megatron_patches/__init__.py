"""Named corrections of megatron-core and mcore-bridge, one file a symptom. Imports nothing of the project.

Use, in this order, once a process:
    megatron_patches.apply()                       # before anything imports megatron
    with megatron_patches.cpu_scope(): ...         # around all Megatron code; a no-op with CUDA
    megatron_patches.apply_to_model(model, config) # after the model is built
    megatron_patches.before_finalize(model, config)# after backward, before finalize_model_grads
"""

from __future__ import annotations

import warnings
from typing import Any

from megatron_patches import (
    adapter_marks,
    adapter_shards,
    cpu_collectives,
    cpu_device,
    deepstack_gradient,
    fla_standin,
    gdn_input_norm,
    gdn_output_norm,
    mixed_dtype_groups,
    one_cudnn,
    registry,
    rope_table,
    te_standin,
    tensor_parallel_marks,
    torch_adam_steps,
)
from megatron_patches.cpu_device import cpu_scope
from megatron_patches.light_imports import light_imports
from megatron_patches.registry import Patch, UntestedVersionError
from megatron_patches.triton_names import triton_names

PATCHES: tuple[Patch, ...] = (
    one_cudnn.PATCH,
    te_standin.PATCH,
    fla_standin.PATCH,
    cpu_device.PATCH,
    cpu_collectives.PATCH,
    rope_table.PATCH,
    torch_adam_steps.PATCH,
    mixed_dtype_groups.PATCH,
    tensor_parallel_marks.PATCH,
    gdn_input_norm.PATCH,
    adapter_marks.PATCH,
    adapter_shards.PATCH,
    deepstack_gradient.PATCH,
    gdn_output_norm.PATCH,
)
_applied: list[str] = []


def apply() -> tuple[str, ...]:
    """Import megatron-core and mcore-bridge with the needed patches; the names of those applied. Once a process.

    Raises UntestedVersionError for an upstream version that the patches were not tried on.
    """
    if _applied:
        return tuple(_applied)
    registry.check_versions()
    _applied.extend(registry.run(PATCHES, "before_import"))
    with cpu_scope(), light_imports(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # what is not installed is said by the patches' log lines
        import mcore_bridge
        import megatron.core  # noqa: F401  (before the triton names: its jit looks for the real package)

        with triton_names():
            import mcore_bridge.model  # noqa: F401
        _applied.extend(registry.run(PATCHES, "after_import"))
    return tuple(_applied)


def apply_to_model(model: Any, config: Any) -> None:
    """Correct a model that was just built."""
    registry.run(PATCHES, "model", model, config)


def before_finalize(model: Any, config: Any) -> None:
    """Complete partial gradients between backward and finalize_model_grads."""
    for patch in PATCHES:
        if patch.phase == "gradients":
            patch.install(model, config)


__all__ = [
    "PATCHES",
    "Patch",
    "UntestedVersionError",
    "apply",
    "apply_to_model",
    "before_finalize",
    "cpu_scope",
    "triton_names",
]
