"""Routers of a mixture of experts: replay of the experts that the engine chose, and how the load is spread.

A router's own top-k is replaced where a choice was recorded; its probabilities are those of the chosen experts, so the gradient
still goes through the router. Engine and trainer round differently, so near ties fall differently, and one other expert
changes a token's log-prob by far more than rounding does.
Legend: T packed tokens, N tokens of this rank, L decoder layers, K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_cua.core.errors import DataError
from slime_cua.core.routing import UNKNOWN
from slime_cua.data.batch import PackedBatch


class Routing:
    """All routers of a model. Set for one micro-batch before its forward; holds until the next, so recompute sees the same."""

    def __init__(self, module: torch.nn.Module, config: Any, tp_group: Any, is_replayed: bool) -> None:
        self._routers: list[Any] = [
            m for m in module.modules() if hasattr(m, "router_replay") and hasattr(m, "topk")
        ]
        self._num_layers, self._num_experts = int(config.num_layers), int(config.num_moe_experts or 0)
        self._top_k = int(config.moe_router_topk)
        self._tp_group = tp_group if config.sequence_parallel else None
        self._is_replayed = is_replayed
        self._target_NLK: torch.Tensor | None = None
        self._is_real_N: torch.Tensor | None = None
        self._counts: dict[int, torch.Tensor] = {}
        self._replayed: torch.Tensor | None = None
        """[choices replayed, of them the router's own]."""
        for router in self._routers:
            router.router_replay = _Hook(self, int(router.layer_number) - 1)

    def __bool__(self) -> bool:
        return bool(self._routers)

    def begin_step(self, num_tokens: int) -> None:
        """Forget counts. num_tokens: packed tokens of the step over all ranks; the balancing loss is their mean."""
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        self._counts, self._replayed = {}, None
        # Megatron multiplies by each micro-batch's tokens; gradients here are sums, so the mean is made once.
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0 / max(num_tokens, 1)))

    def set_batch(self, packed: PackedBatch, device: torch.device) -> None:
        """Take the micro-batch whose forward follows. Raises DataError when its record is of another model's shape."""
        is_real_T = torch.from_numpy(packed.segment_id_T < packed.num_segments)
        self._is_real_N = self._mine(is_real_T).to(device)
        self._target_NLK = None
        if packed.routed_TLK is None or not self._is_replayed:
            return
        shape = packed.routed_TLK.shape[1:]
        if shape != (self._num_layers, self._top_k) or packed.routed_TLK.max(initial=0) >= self._num_experts:
            raise DataError(
                f"recorded experts of {shape[0]} layers, {shape[1]} a token, highest id {packed.routed_TLK.max()}: the model has "
                f"{self._num_layers} layers, {self._top_k} a token, {self._num_experts} experts; the engine runs another model"
            )
        self._target_NLK = self._mine(torch.from_numpy(packed.routed_TLK.astype(np.int64))).to(device)

    def _mine(self, values_T: torch.Tensor) -> torch.Tensor:
        if self._tp_group is None:
            return values_T
        return values_T.chunk(dist.get_world_size(self._tp_group))[dist.get_rank(self._tp_group)]

    def choose(self, layer: int, own_NK: torch.Tensor) -> torch.Tensor:
        """The experts to use [N, K], given the router's own choice."""
        chosen_NK = own_NK
        if self._target_NLK is not None:
            target_NK = self._target_NLK[:, layer]
            is_known_N = target_NK[:, :1] != UNKNOWN
            chosen_NK = torch.where(is_known_N, target_NK, own_NK)
            if torch.is_grad_enabled():
                is_same = (chosen_NK[:, :, None] == own_NK[:, None]).any(-1) & is_known_N
                pair = torch.stack([is_known_N.sum() * own_NK.shape[1], is_same.sum()])
                self._replayed = pair if self._replayed is None else self._replayed + pair
        # Under recompute a layer runs twice, the second time with gradient: counted once either way.
        if torch.is_grad_enabled() and self._is_real_N is not None:
            counts_E = torch.bincount(chosen_NK[self._is_real_N].flatten(), minlength=self._num_experts)
            self._counts[layer] = self._counts.get(layer, 0) + counts_E
        return chosen_NK

    def sums(self) -> dict[str, float]:
        """Counts of the step on this data-parallel rank, all tensor-parallel ranks summed. A collective."""
        if not self._counts:
            return {}
        layers = sorted(self._counts)
        counts_LE = torch.stack([self._counts[layer] for layer in layers]).double()
        replayed = torch.zeros(2, dtype=torch.float64, device=counts_LE.device)
        if self._replayed is not None:
            replayed += self._replayed
        if self._tp_group is not None:
            dist.all_reduce(counts_LE, group=self._tp_group)
            dist.all_reduce(replayed, group=self._tp_group)
        found = {
            f"expert/{layer}/{e}": count
            for layer, row in zip(layers, counts_LE.tolist(), strict=True)
            for e, count in enumerate(row)
        }
        return found | {"replayed_choices": float(replayed[0]), "replayed_own": float(replayed[1])}


class _Hook:
    """In the place of Megatron's RouterReplay on one router: asked for the top-k of every forward."""

    def __init__(self, routing: Routing, layer: int) -> None:
        self._routing, self._layer = routing, layer

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert default_compute_topk is not None
        _, own = default_compute_topk(scores, topk, num_groups, group_topk)
        chosen = self._routing.choose(self._layer, own)
        return scores.gather(1, chosen), chosen


def load_metrics(values: dict[str, float], prefix: str) -> dict[str, float]:
    """Metrics named prefix + ... from sums over all ranks; empty for a model without experts.

    load_max: the busiest expert's tokens over the mean of its layer, mean over layers (1: even). idle_share: experts
    without a token.
    """
    counts: dict[str, list[float]] = {}
    for name, value in values.items():
        if name.startswith("expert/"):
            counts.setdefault(name.split("/")[1], []).append(value)
    rows = [row for row in counts.values() if sum(row) > 0]
    if not rows:
        return {}
    metrics = {
        f"{prefix}load_max": sum(max(row) * len(row) / sum(row) for row in rows) / len(rows),
        f"{prefix}idle_share": sum(count == 0 for row in rows for count in row) / sum(map(len, rows)),
    }
    choices = sum(map(sum, rows))
    metrics[f"{prefix}replayed_share"] = values.get("replayed_choices", 0.0) / choices
    if values.get("replayed_choices"):
        metrics[f"{prefix}replay_agreement"] = values["replayed_own"] / values["replayed_choices"]
    return metrics
