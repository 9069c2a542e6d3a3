"""Symptom: at TP > 1 the gradient norm is too small (Qwen3-VL TP=2: 5.0751 instead of 5.3946), so clipping differs from TP=1.
Upstream: mcore_bridge 1.6.5 config (perform_initialization=False), megatron-core 0.16.1 core/tensor_parallel/layers.py.
Why:      megatron sets tensor_model_parallel on its vocabulary embedding and output layer only while it initialises
          weights; without the mark, ranks above 0 take the shard for a replica and leave it out of the norm.
Remove when: megatron-core marks parameters when it creates them.
"""

from __future__ import annotations

from typing import Any

from megatron_patches.registry import Patch


def install(model: Any, config: Any) -> None:
    """Mark the weights of megatron's own parallel layers as shards."""
    from megatron.core.tensor_parallel import layers

    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None or getattr(weight, "tensor_model_parallel", False):
            continue
        if isinstance(module, layers.VocabParallelEmbedding | layers.ColumnParallelLinear):
            layers.set_tensor_model_parallel_attributes(weight, True, 0, 1)
        elif isinstance(module, layers.RowParallelLinear):
            layers.set_tensor_model_parallel_attributes(weight, True, 1, 1)


PATCH = Patch(
    name="tensor_parallel_marks",
    phase="model",
    symptom="shards of embedding and output layer are missing in the gradient norm at TP > 1",
    install=install,
)
