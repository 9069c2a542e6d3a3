"""Symptom: Qwen3-VL with sequence parallel: 39 of 81 gradients wrong, those of the vision tower by 0.3 to 0.4 of their size.
Upstream: mcore_bridge 1.6.5 model/mm_gpts/qwen3_vl.py.
Why:      each rank adds only its slice of the deepstack embeddings, so their gradient is partial; finalize_model_grads
          averages vision gradients over TP, as if they were whole. An identity whose backward sums makes them whole.
Remove when: the bridge uses a mapping with a summing backward there.
"""

from __future__ import annotations

from typing import Any

from megatron_patches.registry import Patch


def install(model: Any, config: Any) -> None:
    """Sum deepstack gradients over the tensor-parallel group, in the backward."""
    if config.tensor_model_parallel_size == 1 or not config.sequence_parallel:
        return
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    tower = getattr(getattr(model, "visual", None), "visual", None)
    if tower is None:
        return

    def sum_in_backward(module: Any, args: Any, output: Any) -> Any:
        features = getattr(output, "deepstack_features", None)
        if features:
            output.deepstack_features = [copy_to_tensor_model_parallel_region(x) for x in features]
        return output

    tower.register_forward_hook(sum_in_backward)


PATCH = Patch(
    name="deepstack_gradient",
    phase="model",
    symptom="deepstack gradients of the vision tower are averaged instead of summed under sequence parallel",
    install=install,
)
