"""Symptom: LoRA on linear_fc1: a checkpoint of one tensor-parallel size is read wrong under another, without an error.
Upstream: mcore_bridge 1.6.5 tuners/lora.py, LoraParallelLinear.sharded_state_dict.
Why:      the rows of a gated linear_fc1 are gate and up on each rank. The bridge names the two parts of the base weight in a checkpoint,
          but takes the adapter's B, which has the same rows, for one run of rows: gate and up of other ranks change places.
Remove when: the bridge saves B in the two parts, too.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_patches.registry import Patch


def install(model: Any, config: Any) -> None:
    """Save B of each dense linear_fc1 in two parts. Grouped experts are whole on their rank and need none."""
    if not config.gated_linear_unit:
        return
    for name, module in model.named_modules():
        if name.endswith("linear_fc1") and hasattr(module, "lora_B") and not module.is_grouped:
            module.sharded_state_dict = functools.partial(_in_two_parts, module)


def _in_two_parts(
    module: Any, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    state: dict[str, Any] = type(module).sharded_state_dict(module, prefix, sharded_offsets, metadata)
    for key, value in state.items():
        if key.startswith(f"{prefix}lora_B.") and key.endswith(".weight"):
            state[key] = apply_swiglu_sharded_factory(value, sharded_offsets)
    return state


PATCH = Patch(
    name="adapter_shards",
    phase="model",
    symptom="a checkpoint with LoRA on linear_fc1 is read wrong under another tensor-parallel size",
    install=install,
)
