"""Symptom: a bf16 model with some float32 parameters (A_log of gated delta net) trains, but saving its distributed optimiser raises
         'The size of tensor a must match the size of tensor b', or saves the moments of another parameter.
Upstream: megatron-core 0.16.1 core/optimizer/distrib_optimizer.py, _build_optimizer_group_ranges.
Why:      the optimiser's groups list float32 parameters before 16-bit ones; the map from a parameter to its place counts them
          in the order of the gradient buffers. With both kinds in a group the places differ.
Remove when: upstream numbers parameters in the order in which it puts them into the groups.
"""

from __future__ import annotations

from typing import Any

from megatron_patches.registry import Patch


def install() -> None:
    """Number the parameters of a group with float32 ones first."""
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._build_optimizer_group_ranges.__func__  # type: ignore[attr-defined]

    def build(cls: Any, param_groups: Any, gbuf_ranges: Any) -> Any:
        places, ranges = original(cls, param_groups, gbuf_ranges)
        for members in (group["params"] for group in ranges):
            members.sort(key=lambda parameter: parameter.dtype != torch.float32)
            for order, parameter in enumerate(members):
                places[parameter] = (places[parameter][0], order)
        return places, ranges

    DistributedOptimizer._build_optimizer_group_ranges = classmethod(build)


PATCH = Patch(
    name="mixed_dtype_groups",
    phase="after_import",
    symptom="a distributed optimiser over parameters of two dtypes cannot be saved",
    install=install,
)
