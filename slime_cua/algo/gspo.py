"""Step-balanced and standard GSPO: one importance ratio a segment.

Legend: T packed tokens (or trained rows only), K action steps of the batch, S segments, Y action types.
"""

from __future__ import annotations

import math

import torch

from slime_cua.algo.kl import KlChoice, kl_term, split_kl
from slime_cua.algo.reduce import (
    Aggregate,
    Group,
    StepMap,
    add_by_index,
    any_index,
    build_step_map,
    finite_total,
    first_index,
    keep,
)
from slime_cua.core.errors import DataError
from slime_cua.kernels.segment_ratio import RATIO_BOUND, segment_log_ratio

Stats = dict[str, torch.Tensor]


def gspo_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    mask: torch.Tensor,
    segment_id: torch.Tensor,
    step_id: torch.Tensor,
    advantage: torch.Tensor,
    *,
    aggregate: Aggregate = "step",
    step_weight: torch.Tensor | None = None,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    sample_weight: torch.Tensor | None = None,
    num_samples: float | torch.Tensor | None = None,
    kl: KlChoice = None,
    ref_logp: torch.Tensor | None = None,
    step_type: torch.Tensor | None = None,
    num_types: int | None = None,
    cp_group: Group = None,
) -> tuple[torch.Tensor, Stats]:
    """(loss, stats) of GSPO with one ratio a segment; fp32 (fp64 for fp64 inputs).

        delta_t  = logp_t - old_logp_t;      dbar_k = mean of delta over the trained tokens a_k of step k
        log w_i  = sum_k alpha_k dbar_k / sum_k alpha_k                    aggregate="step"
        log w_i  = the same with alpha_k |a_k| for alpha_k                 aggregate="token"; all alpha 1: standard GSPO
        J_i      = min(A_i w_i, A_i clip(w_i, 1 - eps_low, 1 + eps_high)); for A_i < 0 and dual_clip c: max(J_i, c A_i)
        loss     = -(1/B) sum_i sample_weight_i (J_i - kl_coef KL_i);      KL_i with the weights of log w_i
        unclipped: d loss / d logp_t = -(A_i w_i / B) alpha_k / (sum alpha) / |a_k|     for t in a_k

    logp, old_logp: [T] floats of one dtype. mask: [T], nonzero where trained. segment_id, step_id: [T] integers; tokens in any
        order. Where mask is 0 everything may be anything, NaN and infinities too: exact zeros in loss and gradient.
    advantage: [S]. sample_weight: [S], default 1; 0 takes the segment out of loss, gradient and stats, whatever it holds.
    step_weight: [K], alpha >= 0, default 1; steps are numbered over the batch. A step without trained tokens does not count.
    num_samples: B, the global count (or sum of sample weights) over all ranks and micro-batches, fixed before the first
        backward. None: the segments with trained tokens in this call. A segment without trained tokens adds nothing.
    dual_clip: c > 1, or None. kl: "k1" | "k2" | "k3", or (name, coefficient); needs ref_logp [T].
    step_type: [K] integers in 0..num_types-1: adds the statistics by action type.
    cp_group: a segment's tokens may lie on several ranks: sums and counts are reduced before the exponential. Each rank gets
        the whole loss and the gradient of its own tokens; parameter gradients add up over the group.
    Stats: detached sums and counts that add over micro-batches and data-parallel ranks (context-parallel ranks hold copies):
        num_samples, num_steps, num_tokens; num_ratios (here the samples); ratio_sum (each at most e^80), log_ratio_sum, log_ratio_sq_sum; clipped_low, clipped_high, dual_clipped,
        clipped; behaviour_kl_sum (k3 of old to new); kl_sum (to the reference); [Y] with suffix _by_type: steps, tokens,
        clipped_steps (steps inside clipped segments), ratio_sum (exp dbar), behaviour_kl_sum, share_sum (alpha_k / sum alpha).
    Raises ValueError for shapes, dtypes and options; DataError (on all cp ranks alike) for what the numbers hold.
    Source: GSPO, arXiv:2507.18071 eq. 5-7; OS-Helix, appendix E (step balance); dual clip: arXiv:1912.09729.
    """
    check_shapes(
        logp, old_logp, mask, segment_id, step_id, advantage, step_weight, sample_weight, step_type, num_types
    )
    _check_options(aggregate, eps_low, eps_high, dual_clip)
    kl_name, kl_coef = split_kl(kl, ref_logp, logp)
    dtype = torch.float64 if logp.dtype == torch.float64 else torch.float32
    weight_S = torch.ones_like(advantage, dtype=dtype) if sample_weight is None else sample_weight.to(dtype)
    values = (logp, old_logp) if kl_name is None or ref_logp is None else (logp, old_logp, ref_logp)
    known = step_weight if step_weight is not None else step_type
    steps = build_step_map(
        mask,
        segment_id,
        step_id,
        is_active_S=weight_S != 0,
        step_weight=step_weight,
        num_steps=None if known is None else known.shape[0],
        aggregate=aggregate,
        dtype=dtype,
        finite=values,
        cp_group=cp_group,
    )
    check_samples(advantage, weight_S, steps, num_samples)
    log_w_S, means_K2 = segment_log_ratio(logp.to(dtype), old_logp.to(dtype), steps)
    advantage_S = keep(steps.is_present_S, advantage.to(dtype))
    objective_S, branch_S = clipped_objective(log_w_S, advantage_S, eps_low, eps_high, dual_clip)
    if kl_name is not None and ref_logp is not None:
        gap_T = keep(steps.is_kept_T, logp).to(dtype) - keep(steps.is_kept_T, ref_logp).to(dtype)
        kl_S = steps.segment_means(steps.step_means(kl_term(kl_name, gap_T)[:, None])[:, 0])
        objective_S = objective_S - kl_coef * kl_S
    count = steps.is_present_S.sum().to(dtype) if num_samples is None else num_samples
    total = finite_total(keep(steps.is_present_S, weight_S * objective_S).sum())
    loss = 0.0 - total / torch.as_tensor(count, dtype=dtype, device=total.device).clamp(min=1e-30)
    stats = _statistics(steps, log_w_S.detach(), branch_S, means_K2, step_type, num_types)
    if kl_name is not None:
        stats["kl_sum"] = keep(steps.is_present_S, kl_S.detach()).sum()
    return loss, stats


def clipped_objective(
    log_w: torch.Tensor,
    advantage: torch.Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
    cp_group: Group = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(J, {"low", "high", "dual": booleans}) elementwise: J of gspo_loss, with gradient exactly 0 where clipped.

    The branch is chosen before the exponential enters the graph, so a large log-ratio on a clipped branch gives no NaN.
    cp_group: of ranks that hold different tokens: an overflow on one is a DataError on all.
    """
    w = log_w.detach().exp()
    is_high = (advantage > 0) & (w > 1 + eps_high)
    is_low = (advantage < 0) & (w < 1 - eps_low)
    is_dual = (advantage < 0) & (w > dual_clip) if dual_clip is not None else torch.zeros_like(is_low)
    is_free = ~(is_high | is_low | is_dual) & (advantage != 0)
    overflow = any_index(is_free & ~torch.isfinite(w), cp_group)
    if overflow >= 0:
        raise DataError(
            f"an importance ratio overflows at index {overflow}: the old log-probs are not of this policy; set dual_clip to bound it"
        )
    effective = torch.where(is_free, keep(is_free, log_w).exp(), torch.ones_like(log_w))
    effective = torch.where(is_high, torch.full_like(log_w, 1 + eps_high), effective)
    effective = torch.where(is_low, torch.full_like(log_w, 1 - eps_low), effective)
    if dual_clip is not None:
        effective = torch.where(is_dual, torch.full_like(log_w, dual_clip), effective)
    return advantage * effective, {"low": is_low, "high": is_high, "dual": is_dual}


def _statistics(
    steps: StepMap,
    log_w_S: torch.Tensor,
    branch_S: dict[str, torch.Tensor],
    means_KN: torch.Tensor,
    step_type: torch.Tensor | None,
    num_types: int | None,
) -> Stats:
    dtype = log_w_S.dtype
    present_S = steps.is_present_S
    clipped_S = branch_S["low"] | branch_S["high"] | branch_S["dual"]
    stats = {
        "num_samples": present_S.sum().to(dtype),
        "num_steps": steps.is_present_K.sum().to(dtype),
        "num_tokens": steps.count_K.sum(),
        "num_ratios": present_S.sum().to(dtype),
        "ratio_sum": keep(present_S, log_w_S.clamp(max=RATIO_BOUND).exp()).sum(),
        "log_ratio_sum": log_w_S.sum(),
        "log_ratio_sq_sum": log_w_S.square().sum(),
        "clipped": clipped_S.sum().to(dtype),
        "clipped_low": branch_S["low"].sum().to(dtype),
        "clipped_high": branch_S["high"].sum().to(dtype),
        "dual_clipped": branch_S["dual"].sum().to(dtype),
        "behaviour_kl_sum": steps.segment_means(means_KN[:, 1]).sum(),
    }
    if step_type is not None:
        stats |= type_statistics(steps, clipped_S, means_KN, step_type, num_types)
    return stats


def type_statistics(
    steps: StepMap,
    clipped_S: torch.Tensor,
    means_KN: torch.Tensor,
    step_type: torch.Tensor,
    num_types: int | None,
) -> Stats:
    """Sums by action type [Y]; means_KN[:, 0] is the mean log-ratio, [:, 1] the mean k3 of each step."""
    present_K = steps.is_present_K
    type_K = torch.where(present_K, step_type, 0).long()
    size = num_types if num_types is not None else int(type_K.max()) + 1 if type_K.numel() else 1
    if first_index(present_K & ((type_K < 0) | (type_K >= size))) >= 0:
        raise DataError(f"step_type must be in 0..{size - 1} (num_types is {size})")
    columns = {
        "steps": torch.ones_like(steps.count_K),
        "tokens": steps.count_K,
        "clipped_steps": clipped_S.to(steps.count_K.dtype)[steps.segment_K]
        if steps.num_segments
        else torch.zeros_like(steps.count_K),
        "ratio_sum": means_KN[:, 0].clamp(max=RATIO_BOUND).exp(),
        "behaviour_kl_sum": means_KN[:, 1],
        "share_sum": steps.coefficient_K,
    }
    table_KC = keep(present_K[:, None], torch.stack(list(columns.values()), dim=1))
    table_YC = add_by_index(table_KC, type_K, size)
    return {f"{name}_by_type": table_YC[:, column] for column, name in enumerate(columns)}


def check_samples(
    advantage: torch.Tensor,
    weight_S: torch.Tensor,
    steps: StepMap,
    num_samples: float | torch.Tensor | None,
) -> None:
    """DataError for a NaN or infinite advantage or weight of a present segment, a negative weight, a count that is not positive."""
    is_bad_S = (steps.is_present_S & ~torch.isfinite(advantage)) | ~torch.isfinite(weight_S) | (weight_S < 0)
    bad = first_index(is_bad_S)
    if bad >= 0:
        raise DataError(
            f"segment {bad}: advantage {float(advantage[bad])}, sample_weight {float(weight_S[bad])}: "
            "an invalid episode's segments get sample_weight 0, not a missing advantage; no weight is negative"
        )
    if num_samples is not None:
        check_count("num_samples", float(num_samples), steps)


def check_count(name: str, count: float, steps: StepMap) -> None:
    """DataError for a denominator that is negative, NaN or infinite, or 0 with something to divide."""
    if not 0 <= count < math.inf or (count == 0 and bool(steps.is_present_S.any())):
        raise DataError(f"{name} {count} must be positive: it is the global count of the optimiser step")


def _check_options(aggregate: str, eps_low: float, eps_high: float, dual_clip: float | None) -> None:
    if aggregate not in ("step", "token"):
        raise ValueError(f'aggregate {aggregate!r} must be "step" or "token"')
    if not (eps_low > 0 and eps_high > 0):
        raise ValueError(f"eps_low {eps_low} and eps_high {eps_high} must be positive")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip {dual_clip} must be above 1, or None for off")


def check_shapes(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    mask: torch.Tensor,
    segment_id: torch.Tensor,
    step_id: torch.Tensor,
    advantage: torch.Tensor,
    step_weight: torch.Tensor | None,
    sample_weight: torch.Tensor | None,
    step_type: torch.Tensor | None,
    num_types: int | None,
) -> None:
    """ValueError naming the tensor whose shape or dtype is wrong."""
    tokens = {
        "logp": logp,
        "old_logp": old_logp,
        "mask": mask,
        "segment_id": segment_id,
        "step_id": step_id,
    }
    for name, value in tokens.items():
        if value.dim() != 1 or value.shape != logp.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; all token tensors must be [T] = {tuple(logp.shape)}"
            )
    if logp.dtype != old_logp.dtype or not logp.dtype.is_floating_point:
        raise ValueError(f"logp ({logp.dtype}) and old_logp ({old_logp.dtype}) must share a float dtype")
    integers = {"segment_id": segment_id, "step_id": step_id, "step_type": step_type}
    for name, ids in integers.items():
        if ids is not None and (ids.dtype.is_floating_point or ids.dtype == torch.bool):
            raise ValueError(f"{name} must hold integers, not {ids.dtype}")
    if advantage.dim() != 1 or not advantage.dtype.is_floating_point:
        raise ValueError(
            f"advantage must be floats [S], not {advantage.dtype} of shape {tuple(advantage.shape)}"
        )
    if sample_weight is not None and sample_weight.shape != advantage.shape:
        raise ValueError(
            f"sample_weight {tuple(sample_weight.shape)} must be [S] like advantage {tuple(advantage.shape)}"
        )
    for name, entry in {"step_weight": step_weight, "step_type": step_type}.items():
        if entry is not None and entry.dim() != 1:
            raise ValueError(f"{name} must be [K], one entry a step, not {tuple(entry.shape)}")
    if step_weight is not None and step_type is not None and step_weight.shape != step_type.shape:
        raise ValueError(
            f"step_weight {tuple(step_weight.shape)} and step_type {tuple(step_type.shape)} must both be [K]"
        )
    if num_types is not None and num_types < 1:
        raise ValueError(f"num_types {num_types} must be at least 1")
