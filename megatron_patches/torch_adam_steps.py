"""Symptom: without Transformer Engine or Apex, loading a distributed optimiser raises KeyError: 'step'; and its steps would
         count once a parameter each update, because all parameters share one step tensor.
Upstream: megatron-core 0.16.1 core/optimizer/distrib_optimizer.py, _set_main_param_and_optimizer_states and load_state_dict.
Why:      torch's AdamW keeps its step in the state of each parameter, the fused optimisers keep it in the group; the loader
          copies every state tensor from the checkpoint, where step is not, and load_state_dict hands out one tensor.
Remove when: megatron-core handles the step of torch optimisers there.
"""

from __future__ import annotations

from typing import Any

from megatron_patches.registry import Patch


def install() -> None:
    """Give each parameter a step tensor of its own, already at the value of the loaded group."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


PATCH = Patch(
    name="torch_adam_steps",
    phase="after_import",
    symptom="a distributed optimiser on torch's AdamW cannot be loaded and shares one step tensor",
    install=install,
)
