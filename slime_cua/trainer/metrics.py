"""Sums of a step, over micro-batches and ranks, and the means made from them.

Names are those of slime_cua.observability.metrics: loss/... for reinforcement learning, sft/... for supervised steps.
"""

from __future__ import annotations

import numpy as np
import torch

from slime_cua.algo.losses import LossInputs
from slime_cua.data.batch import STEP_TYPES, PackedBatch, PackedStep
from slime_cua.trainer.gap import SIGHTS, gap_metrics, gap_sums
from slime_cua.trainer.routing import load_metrics
from slime_cua.trainer.runtime import Layout, add_dicts


class Totals:
    """Adds up losses and statistics; nothing leaves the device before `reduce`."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._counts: dict[str, float] = {}
        self.values: dict[str, float] = {}
        """Sums over the whole batch, after reduce."""

    def add(
        self,
        loss: torch.Tensor,
        stats: dict[str, torch.Tensor],
        inputs: LossInputs,
        packed: PackedBatch,
        version: int | None = None,
        num_lost: int = 0,
    ) -> None:
        """One micro-batch. version: of the current weights; the gap to the engine is measured on its tokens.
        num_lost: tokens whose behaviour weights are gone."""
        ratio = (inputs.old_logp_T - inputs.logp_T.detach()).sum()
        sums = {"loss": loss, "log_ratio_old_new": ratio, **stats}
        if inputs.entropy_T is not None:
            sums["entropy_sum"] = inputs.entropy_T.sum()
        if version is not None:
            sums |= _gap(inputs, packed, version)
        for name, value in sums.items():
            self._tensors[name] = self._tensors.get(name, 0.0) + value.detach()
        for name, number in {
            "microbatches": 1,
            "rows": packed.num_trained,
            "packed": packed.num_tokens,
            "lost": num_lost,
        }.items():
            self._counts[name] = self._counts.get(name, 0.0) + number

    def reduce(self, layout: Layout, more: dict[str, float] | None = None) -> None:
        """Sum over data-parallel ranks, `more` of this rank included; a collective that empty ranks join too."""
        mine = {**self._counts, **(more or {})}
        for name, tensor in self._tensors.items():
            if tensor.dim() == 0:
                mine[name] = float(tensor)
            else:
                keys = STEP_TYPES if len(tensor) == len(STEP_TYPES) else range(len(tensor))
                mine.update({f"{name}/{k}": v for k, v in zip(keys, tensor.tolist(), strict=True) if v})
        self.values = add_dicts(mine, layout)


def named_metrics(
    values: dict[str, float], step: dict[str, float], loss: str, batch: PackedStep
) -> dict[str, float]:
    """Metric name -> value from the sums of a batch and what the optimiser step said ({} when none was taken)."""
    kind = "sft" if loss == "sft" else "loss"
    rows = max(values.get("rows", 0.0), 1.0)
    metrics = {
        "sft/loss" if kind == "sft" else "loss/policy": values.get("loss", 0.0),
        f"{kind}/grad_norm": step.get("grad_norm", 0.0),
        f"{kind}/lr": step.get("lr", 0.0),
        f"{kind}/num_samples": float(batch.num_segments),
        f"{kind}/num_trained_tokens": float(batch.num_tokens),
        f"{kind}/padding_share": batch.padding_share if batch.num_segments else 0.0,
        f"{kind}/num_microbatches": values.get("microbatches", 0.0),
        f"{kind}/num_packed_tokens": values.get("packed", 0.0),
        f"{kind}/is_skipped": step.get("skipped", 1.0),
    }
    metrics.update(load_metrics(values, "moe/" if kind == "loss" else "sft/moe_"))
    if kind == "loss":
        metrics["loss/kl"] = values.get("log_ratio_old_new", 0.0) / rows
        metrics["loss/entropy"] = values.get("entropy_sum", 0.0) / rows
        metrics.update(_ratio_means(values))
        for name in ("", *STEP_TYPES, *SIGHTS):
            metrics.update(gap_metrics(values, name))
        if values.get("lost"):
            metrics["loss/old_from_engine_share"] = values["lost"] / rows
    return metrics


def _gap(inputs: LossInputs, packed: PackedBatch, version: int) -> dict[str, torch.Tensor]:
    rows = packed.is_trained_T
    device = inputs.logp_T.device
    engine_R = torch.from_numpy(packed.old_logp_T[rows]).to(device)
    kinds = (
        (STEP_TYPES, torch.from_numpy(packed.step_type_K[packed.step_id_T[rows]])),
        (SIGHTS, torch.from_numpy(packed.sees_image_T[rows].astype(np.int64))),
    )
    is_current_R = torch.from_numpy(packed.version_T[rows] == version).to(device)
    return gap_sums(engine_R, inputs.logp_T, is_current_R, kinds)


def _ratio_means(values: dict[str, float]) -> dict[str, float]:
    """Means of the sums that the policy losses give; ratios are of samples or of tokens, as the loss has them."""
    samples = values.get("num_samples", 0.0)
    means: dict[str, float] = {}
    ratios = values.get("num_ratios", 0.0)
    if ratios:
        means["loss/ratio_mean"] = values["ratio_sum"] / ratios
        means["loss/clip_fraction"] = values.get("clipped", 0.0) / ratios
    for kind in STEP_TYPES:
        steps = values.get(f"steps_by_type/{kind}", 0.0)
        if steps:
            means[f"loss/clip_fraction/{kind}"] = values.get(f"clipped_steps_by_type/{kind}", 0.0) / steps
            means[f"loss/step_share/{kind}"] = values.get(f"share_sum_by_type/{kind}", 0.0) / max(
                samples, 1.0
            )
    return means
