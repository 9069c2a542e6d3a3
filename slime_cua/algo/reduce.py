"""From tokens to steps to segments: the sums under every loss, with context parallelism and the checks of ids.

Legend: T packed tokens (or trained rows only), K action steps, S segments, N values a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from slime_cua.core.errors import DataError

Aggregate = Literal["step", "token"]
Group = dist.ProcessGroup | None
MAX_STEPS = 1 << 24
"""Of a batch, where only the ids say how many there are; larger ids are a mistake, not an allocation."""


class _SumOverGroup(torch.autograd.Function):
    """Sum over ranks. Every rank computes the same loss from the sum, so the gradient of a rank's own share is the sum's."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def sum_over(value: torch.Tensor, group: Group) -> torch.Tensor:
    """`value` summed over `group`; the backward is the identity (gradients of own tokens)."""
    if group is None or dist.get_world_size(group) == 1:
        return value
    summed: torch.Tensor = _SumOverGroup.apply(value, group)
    return summed


def add_by_index(value: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """Sum of the rows of `value` by `index`: [size, ...]. With size 0 every index is a placeholder 0."""
    return value.new_zeros((max(size, 1), *value.shape[1:])).index_add(0, index, value)[:size]


@dataclass(frozen=True)
class StepMap:
    """Which trained token belongs to which step, and which step to which segment. Counts are over the cp group."""

    is_kept_T: torch.Tensor
    """Trained, and its segment takes part."""
    step_T: torch.Tensor
    """0 where not kept."""
    segment_K: torch.Tensor
    """0 for a step without tokens."""
    count_K: torch.Tensor
    """Trained tokens of the step, float."""
    coefficient_K: torch.Tensor
    """Share of the step in its segment; sums to 1 over a segment. `step`: alpha_k / sum alpha. `token`: alpha_k |a_k| / sum."""
    is_present_K: torch.Tensor
    is_present_S: torch.Tensor
    """The segment has trained tokens and takes part."""
    cp_group: Group

    @property
    def num_steps(self) -> int:
        return self.segment_K.shape[0]

    @property
    def num_segments(self) -> int:
        return self.is_present_S.shape[0]

    def step_means(self, values_TN: torch.Tensor) -> torch.Tensor:
        """[K, N]: mean over the tokens of each step, reduced over the cp group; 0 for a step without tokens."""
        sums_KN = sum_over(add_by_index(values_TN, self.step_T, self.num_steps), self.cp_group)
        return sums_KN / self.count_K.clamp(min=1.0)[:, None]

    def segment_means(self, values_K: torch.Tensor) -> torch.Tensor:
        """[S]: sum_k coefficient_k value_k."""
        return add_by_index(self.coefficient_K * values_K, self.segment_K, self.num_segments)

    def segment_of_token(self) -> torch.Tensor:
        """[T], 0 where not kept."""
        if self.num_steps == 0:
            return torch.zeros_like(self.step_T)
        return torch.where(self.is_kept_T, self.segment_K[self.step_T], 0)


def keep(is_kept: torch.Tensor, value: torch.Tensor, other: float = 0.0) -> torch.Tensor:
    """`value` where kept, else `other`, so that NaN and infinities elsewhere touch neither value nor gradient."""
    return torch.where(is_kept, value, torch.full_like(value, other))


def finite_total(total: torch.Tensor) -> torch.Tensor:
    """`total`, the loss before it is divided by the count; the same on all ranks of a cp group. DataError if it overflowed."""
    if not bool(torch.isfinite(total.detach())):
        raise DataError(
            f"the loss is {float(total.detach())}: ratio or KL overflows; the old or the reference log-probs are not near this policy"
        )
    return total


def build_step_map(
    mask: torch.Tensor,
    segment_id: torch.Tensor,
    step_id: torch.Tensor,
    *,
    is_active_S: torch.Tensor,
    step_weight: torch.Tensor | None,
    num_steps: int | None,
    aggregate: Aggregate,
    dtype: torch.dtype,
    finite: tuple[torch.Tensor, ...] = (),
    cp_group: Group = None,
) -> StepMap:
    """The StepMap of a batch.

    mask, segment_id, step_id: [T]. is_active_S: segments that take part; tokens of others count as masked.
    step_weight: [K], alpha; None: 1. finite: tensors [T] that must be finite where trained.
    Raises DataError, on all ranks of cp_group alike: ids out of range, non-finite values, a step in two segments,
    a segment whose steps have no positive weight.
    """
    num_segments = is_active_S.shape[0]
    if num_steps is None:
        num_steps = _count_steps(mask, step_id, cp_group)
    mask_T = mask if mask.dtype == torch.bool else mask != 0
    is_id_bad_T = mask_T & (
        (segment_id < 0) | (segment_id >= num_segments) | (step_id < 0) | (step_id >= num_steps)
    )
    usable_T = mask_T & ~is_id_bad_T
    segment_T = torch.where(usable_T, segment_id, 0).long()
    kept_T = usable_T & is_active_S[segment_T] if num_segments else torch.zeros_like(mask_T)
    step_T = torch.where(kept_T, step_id, 0).long()
    is_value_bad_T = torch.zeros_like(mask_T)
    for value in finite:
        is_value_bad_T |= kept_T & ~torch.isfinite(value)
    segment_K = _segment_of_step(
        segment_T, step_T, kept_T, is_id_bad_T, is_value_bad_T, num_steps, num_segments, cp_group
    )
    count_K = sum_over(add_by_index(kept_T.to(dtype), step_T, num_steps), cp_group)
    coefficient_K = _coefficients(segment_K, count_K, step_weight, num_segments, aggregate)
    present_S = add_by_index((count_K > 0).to(dtype), segment_K, num_segments) > 0
    return StepMap(
        kept_T, step_T, segment_K, count_K, coefficient_K, count_K > 0, present_S & is_active_S, cp_group
    )


def _count_steps(mask: torch.Tensor, step_id: torch.Tensor, cp_group: Group) -> int:
    last = torch.where(mask != 0, step_id.long(), -1)
    top = last.max() if last.numel() else last.new_tensor(-1)
    if cp_group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=cp_group)
    if int(top) >= MAX_STEPS:
        raise DataError(
            f"a trained token has the step id {int(top)}: number the steps of the batch from 0 (at most {MAX_STEPS})"
        )
    return int(top) + 1


def _segment_of_step(
    segment_T: torch.Tensor,
    step_T: torch.Tensor,
    kept_T: torch.Tensor,
    is_id_bad_T: torch.Tensor,
    is_value_bad_T: torch.Tensor,
    num_steps: int,
    num_segments: int,
    cp_group: Group,
) -> torch.Tensor:
    """[K], 0 where the step has no token. One max-reduction carries ids and faults, so all ranks raise or none."""
    owner_T = torch.where(kept_T, segment_T, -1)
    high_K = torch.full((num_steps + 1,), -1, dtype=torch.long, device=segment_T.device)
    spot_T = torch.where(kept_T, step_T, num_steps)
    high_K = high_K.scatter_reduce(0, spot_T, owner_T, "amax")
    low_T = torch.where(kept_T, -segment_T, -num_segments)
    low_K = torch.full_like(high_K, -num_segments).scatter_reduce(0, spot_T, low_T, "amax")
    value_fault = (
        torch.where(is_value_bad_T, segment_T, -1).amax() if segment_T.numel() else high_K.new_tensor(-1)
    )
    faults = torch.stack([is_id_bad_T.any().long(), value_fault])
    packed = torch.cat([high_K[:num_steps], low_K[:num_steps], faults])
    if cp_group is not None:
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=cp_group)
    high_K, low_K = packed[:num_steps], packed[num_steps : 2 * num_steps]
    is_split_K = (high_K >= 0) & (high_K != -low_K)
    split = torch.where(is_split_K, torch.arange(num_steps, device=high_K.device), -1)
    split_fault = split.amax() if num_steps else high_K.new_tensor(-1)
    has_bad_id, bad_segment, bad_step = torch.stack([packed[-2], packed[-1], split_fault]).tolist()
    if has_bad_id:
        raise DataError(
            f"a trained token has a segment id outside 0..{num_segments - 1} or a step id outside 0..{num_steps - 1}"
        )
    if bad_segment >= 0:
        raise DataError(
            f"segment {bad_segment} has a log-prob that is NaN or infinite at a trained token (or another input of the loss is): mask it, or give the segment sample_weight 0"
        )
    if bad_step >= 0:
        raise DataError(
            f"step {bad_step} has tokens in two segments: number the steps over the batch, not within a segment"
        )
    return high_K.clamp(min=0)


def _coefficients(
    segment_K: torch.Tensor,
    count_K: torch.Tensor,
    step_weight: torch.Tensor | None,
    num_segments: int,
    aggregate: Aggregate,
) -> torch.Tensor:
    alpha_K = torch.ones_like(count_K) if step_weight is None else step_weight.to(count_K.dtype)
    if num_segments == 0:
        return torch.zeros_like(count_K)
    present_K = count_K > 0
    raw_K = keep(present_K, alpha_K * count_K if aggregate == "token" else alpha_K)
    total_S = add_by_index(raw_K, segment_K, num_segments)
    steps_S = add_by_index(present_K.to(count_K.dtype), segment_K, num_segments)
    is_bad_K = present_K & ~((raw_K >= 0) & torch.isfinite(raw_K))
    is_bad_S = (steps_S > 0) & ~(total_S > 0)
    bad_step, bad_segment = torch.stack([_first(is_bad_K), _first(is_bad_S)]).tolist()
    if bad_step >= 0:
        raise DataError(f"the weight of step {bad_step} is negative or not finite: step weights must be >= 0")
    if bad_segment >= 0:
        raise DataError(
            f"segment {bad_segment} has no step with a positive weight: raise the weight of one of its action types or drop it"
        )
    return raw_K / torch.where(total_S > 0, total_S, 1.0)[segment_K]


def _first(is_bad: torch.Tensor) -> torch.Tensor:
    """Index of the first true entry, -1 if there is none; stays on the device."""
    index = torch.arange(is_bad.shape[0], device=is_bad.device)
    padded = torch.cat([torch.where(is_bad, index, is_bad.shape[0]), index.new_tensor([is_bad.shape[0]])])
    first = padded.amin()
    return torch.where(first == is_bad.shape[0], -1, first)


def first_index(is_bad: torch.Tensor) -> int:
    """Index of the first true entry of a vector, -1 if there is none."""
    return int(_first(is_bad))


def any_index(is_bad: torch.Tensor, group: Group) -> int:
    """As first_index, but the same number on every rank of `group`: -1 only where no rank has a true entry."""
    index = _first(is_bad)
    if group is not None:
        dist.all_reduce(index, op=dist.ReduceOp.MAX, group=group)
    return int(index)
