"""Symptom: with sequence parallel, the gradient of a gated-delta-net layer's input norm is TP times too large.
Upstream: mcore_bridge 1.6.5 model/modules/gated_delta_net.py, megatron-core 0.16.1 finalize_model_grads.
Why:      the bridge gathers the sequence first and runs in_proj without sequence parallel, so every rank already has the
          whole gradient of the norm in in_proj; its sequence_parallel flag makes megatron sum it again.
Remove when: the bridge clears the flag.
"""

from __future__ import annotations

from typing import Any

from megatron_patches.registry import Patch


def install(model: Any, config: Any) -> None:
    """Clear the flag of in_proj's norm."""
    for name, parameter in model.named_parameters():
        if name.endswith("self_attention.in_proj.layer_norm_weight"):
            parameter.sequence_parallel = False


PATCH = Patch(
    name="gdn_input_norm",
    phase="model",
    symptom="gated-delta-net input norm gradient is summed twice under sequence parallel",
    install=install,
)
