"""Symptom: LoRA at tp > 1: the gradient norm is too large, and under sequence parallel the adapters of gated delta net get TP
         times their gradient.
Upstream: mcore_bridge 1.6.5 tuners/lora.py, model/modules/gated_delta_net.py; Transformer Engine 2.11 (marks every weight a shard).
Why:      A of a column-parallel and B of a row-parallel layer are whole on each rank, but marked as shards, so the norm counts
          them on every rank. The bridge flags them `sequence_parallel`, so that Megatron sums their gradients; its gated delta
          net gathers the sequence first and turns sequence parallelism off inside, where each rank has the whole gradient.
Remove when: the bridge marks adapters by what their layer does.
"""

from __future__ import annotations

from typing import Any

from megatron_patches.registry import Patch

_GATHERED = ("self_attention.in_proj.lora_", "self_attention.out_proj.lora_")


def install(model: Any, config: Any) -> None:
    """Correct the marks of adapters' weights; a model without adapters is left as it is."""
    for name, module in model.named_modules():
        if not (hasattr(module, "lora_A") and hasattr(module, "is_parallel_a")):
            continue
        whole = module.lora_B if module.is_parallel_a else module.lora_A
        for parameter in whole.parameters():
            parameter.tensor_model_parallel = False
        if any(part in f"{name}.lora_" for part in _GATHERED):
            for parameter in (*module.lora_A.parameters(), *module.lora_B.parameters()):
                parameter.sequence_parallel = False


PATCH = Patch(
    name="adapter_marks",
    phase="model",
    symptom="LoRA weights that are whole on each rank are counted and summed as shards",
    install=install,
)
