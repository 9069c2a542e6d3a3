"""Symptom: at TP > 1 without sequence parallel, the gradient of a gated-delta-net layer's output norm is wrong (off by 0.6 to
         0.8 of its size) and the copies on the ranks drift apart.
Upstream: megatron-core 0.16.1 core/ssm/gated_delta_net.py, core/distributed/finalize_model_grads.py.
Why:      the norm runs over each rank's own heads, so its gradient is partial; finalize_model_grads sums only parameters
          flagged sequence_parallel, and those only under sequence parallel.
Remove when: megatron-core reduces out_norm over the tensor-parallel group.
"""

from __future__ import annotations

from typing import Any

from megatron_patches.registry import Patch


def install(model: Any, config: Any) -> None:
    """Sum the partial gradients over the tensor-parallel group. Called after backward, before finalize_model_grads."""
    if config.tensor_model_parallel_size == 1 or config.sequence_parallel:
        return
    import torch.distributed
    from megatron.core import mpu

    for name, parameter in model.named_parameters():
        if (
            name.endswith("self_attention.out_norm.weight")
            and getattr(parameter, "main_grad", None) is not None
        ):
            torch.distributed.all_reduce(parameter.main_grad, group=mpu.get_tensor_model_parallel_group())


PATCH = Patch(
    name="gdn_output_norm",
    phase="gradients",
    symptom="gated-delta-net output norm gradient is not summed over TP ranks",
    install=install,
)
