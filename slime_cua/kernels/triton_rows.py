"""Triton kernels over rows of logits. They run on CUDA, and on CPU under TRITON_INTERPRET=1.

Legend: R rows, C columns of the block at hand, first_column its place in this rank's vocabulary shard.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _online_stats_kernel(
    logits_RC, row_stride, stats_R4, target_R, num_columns: tl.constexpr, num_real, first_column, inverse_temperature, BLOCK: tl.constexpr
):  # fmt: skip
    """One pass: fold these columns into the row's running (max, sum, target logit, weighted sum)."""
    row = tl.program_id(0).to(tl.int64)
    base = logits_RC + row * row_stride
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + lane
        is_real = (column < num_columns) & (first_column + column < num_real)
        value = tl.load(base + column, mask=is_real, other=float("-inf")) * inverse_temperature
        new_top = tl.maximum(top, value)
        old_shift = tl.where(top > float("-inf"), top - new_top, 0.0)
        shift = tl.where(is_real, value - new_top, 0.0)
        old_scale = tl.exp(old_shift)
        scale = tl.where(is_real, tl.exp(shift), 0.0)
        weighted = old_scale * (weighted + old_shift * total) + scale * shift
        total = old_scale * total + scale
        top = new_top
    before = tl.load(stats_R4 + row * 4)
    row_top = tl.maximum(tl.max(top, 0), before)
    lane_shift = tl.where(top > float("-inf"), top - row_top, 0.0)
    lane_scale = tl.where(top > float("-inf"), tl.exp(lane_shift), 0.0)
    before_shift = tl.where(before > float("-inf"), before - row_top, 0.0)
    before_scale = tl.where(before > float("-inf"), tl.exp(before_shift), 0.0)
    before_total = tl.load(stats_R4 + row * 4 + 1)
    before_weighted = tl.load(stats_R4 + row * 4 + 3)
    row_total = tl.sum(lane_scale * total, 0) + before_scale * before_total
    row_weighted = tl.sum(lane_scale * (weighted + lane_shift * total), 0)
    row_weighted += before_scale * (before_weighted + before_shift * before_total)
    tl.store(stats_R4 + row * 4, row_top)
    tl.store(stats_R4 + row * 4 + 1, row_total)
    tl.store(stats_R4 + row * 4 + 3, row_weighted)
    target = tl.load(target_R + row) - first_column
    if (target >= 0) & (target < num_columns):
        tl.store(stats_R4 + row * 4 + 2, tl.load(base + target) * inverse_temperature)


@triton.jit
def _exponentials_kernel(
    logits_RC, row_stride, out_RC, out_stride, stats_R4, target_R, num_columns: tl.constexpr, num_real, inverse_temperature, BLOCK: tl.constexpr
):  # fmt: skip
    """Two passes over the whole shard's row (the second from L2): its statistics, and exp(l - max) in low precision."""
    row = tl.program_id(0).to(tl.int64)
    base = logits_RC + row * row_stride
    out = out_RC + row * out_stride
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + lane
        top = tl.maximum(top, tl.load(base + column, mask=column < num_real, other=float("-inf")))
    row_top = tl.max(top, 0) * inverse_temperature
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + lane
        is_real = column < num_real
        value = tl.load(base + column, mask=is_real, other=0.0) * inverse_temperature
        shift = tl.where(is_real, value - row_top, 0.0)
        scale = tl.where(is_real, tl.exp(shift), 0.0)
        total += scale
        weighted += scale * shift
        tl.store(out + column, scale.to(out_RC.dtype.element_ty), mask=column < num_columns)
    tl.store(stats_R4 + row * 4, row_top)
    tl.store(stats_R4 + row * 4 + 1, tl.sum(total, 0))
    tl.store(stats_R4 + row * 4 + 3, tl.sum(weighted, 0))
    target = tl.load(target_R + row)
    if (target >= 0) & (target < num_real):
        tl.store(stats_R4 + row * 4 + 2, tl.load(base + target) * inverse_temperature)


@triton.jit
def _grad_kernel(
    logits_RC, row_stride, out_RC, out_stride, target_R, lse_R, entropy_R, grad_logp_R, grad_entropy_R,
    num_columns, num_real, first_column, inverse_temperature, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient with respect to the raw logits of these columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = (column < num_columns) & (first_column + column < num_real)
    value = tl.load(logits_RC + row * row_stride + column, mask=is_real, other=0.0) * inverse_temperature
    log_p = tl.where(is_real, value - tl.load(lse_R + row), 0.0)
    p = tl.where(is_real, tl.exp(log_p), 0.0)
    is_target = (first_column + column == tl.load(target_R + row)) & is_real
    grad = tl.load(grad_logp_R + row) * (tl.where(is_target, 1.0, 0.0) - p)
    if WITH_ENTROPY:
        grad -= tl.load(grad_entropy_R + row) * p * (log_p + tl.load(entropy_R + row))
    grad *= inverse_temperature
    tl.store(out_RC + row * out_stride + column, grad.to(out_RC.dtype.element_ty), mask=column < num_columns)


@triton.jit
def _scale_kernel(source_RC, target_RC, scale_R, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    value = tl.load(source_RC + row * num_columns + column, mask=inside, other=0.0).to(tl.float32)
    scaled = value * tl.load(scale_R + row)
    tl.store(target_RC + row * num_columns + column, scaled.to(target_RC.dtype.element_ty), mask=inside)


def fold_statistics(
    logits_RC: torch.Tensor,
    stats_R4: torch.Tensor,
    target_R: torch.Tensor,
    *,
    num_real: int,
    first_column: int,
    inverse_temperature: float,
) -> None:
    """Fold columns first_column ... of the shard into stats_R4 [R, 4] fp32: max, sum exp(l - max), target logit, weighted sum.

    logits_RC: fp32 raw logits, rows contiguous. target_R: int64 index in this shard, outside [0, num_real) where elsewhere.
    """
    rows, columns = logits_RC.shape
    if rows:
        _online_stats_kernel[(rows,)](
            logits_RC, logits_RC.stride(0), stats_R4, target_R, columns, num_real, first_column, inverse_temperature,
            BLOCK=_block(columns), num_warps=_WARPS,
        )  # fmt: skip


def write_exponentials(
    logits_RC: torch.Tensor,
    out_RC: torch.Tensor,
    stats_R4: torch.Tensor,
    target_R: torch.Tensor,
    *,
    num_real: int,
    inverse_temperature: float,
) -> None:
    """out_RC = exp(l - row max) (0 in padding) in its dtype, and stats_R4 as fold_statistics, for the whole shard."""
    rows, columns = logits_RC.shape
    if rows:
        _exponentials_kernel[(rows,)](
            logits_RC, logits_RC.stride(0), out_RC, out_RC.stride(0), stats_R4, target_R, columns, num_real,
            inverse_temperature, BLOCK=_block(columns), num_warps=_WARPS,
        )  # fmt: skip


def write_logit_gradient(
    logits_RC: torch.Tensor,
    out_RC: torch.Tensor,
    target_R: torch.Tensor,
    lse_R: torch.Tensor,
    entropy_R: torch.Tensor,
    grad_logp_R: torch.Tensor,
    grad_entropy_R: torch.Tensor | None,
    *,
    num_real: int,
    first_column: int,
    inverse_temperature: float,
) -> None:
    """out_RC = d loss / d raw logits of these columns: the formulas of linear_logprob."""
    rows, columns = logits_RC.shape
    if rows:
        block = _block(columns, most=2048)
        _grad_kernel[(rows, triton.cdiv(columns, block))](
            logits_RC, logits_RC.stride(0), out_RC, out_RC.stride(0), target_R, lse_R, entropy_R, grad_logp_R,
            grad_logp_R if grad_entropy_R is None else grad_entropy_R, columns, num_real, first_column,
            inverse_temperature, WITH_ENTROPY=grad_entropy_R is not None, BLOCK=block, num_warps=_WARPS,
        )  # fmt: skip


def scale_rows(source_RC: torch.Tensor, scale_R: torch.Tensor, out_RC: torch.Tensor) -> torch.Tensor:
    """out_RC = scale_R[:, None] * source_RC, one rounding; both contiguous; may be in place. Returns out_RC."""
    rows, columns = source_RC.shape
    if rows:
        block = _block(columns, most=2048)
        _scale_kernel[(rows, triton.cdiv(columns, block))](
            source_RC, out_RC, scale_R, columns, BLOCK=block, num_warps=_WARPS
        )
    return out_RC


def _block(columns: int, most: int = _BLOCK) -> Any:
    return max(16, min(most, triton.next_power_of_2(columns)))
