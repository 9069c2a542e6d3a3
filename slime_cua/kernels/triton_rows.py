"""Triton kernels over rows of logits. They run on CUDA, and on CPU under TRITON_INTERPRET=1.

Legend: R rows, C columns of the block at hand, W ranks of the group; first_column is the block's place in this rank's shard,
first_id the id of the shard's first row. stats_R4 holds of each row and shard: a reference c, sum exp(l - c), the target's
logit (-inf if elsewhere), sum exp(l - c) (l - c); an empty shard has -inf, 0, -inf, 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_WARPS = 8
_SMALL = 1 << 22
"""Up to here torch's launch, cheaper for the CPU than Triton's, outweighs its slower kernel for mixed precisions."""
REFERENCE_GAP = 20.0
"""How far above its reference a row's maximum may lie; beyond, the row is written again."""
_FURTHEST = tl.constexpr(60.0)
"""Largest log(sum of all / reference) that enters a scale: further down nothing of the shard survives rounding."""


@triton.jit
def _fold_kernel(
    logits_RC, row_stride, stats_R4, target_R, first_id, num_columns: tl.constexpr, num_real, first_column,
    inverse_temperature, IS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One pass: fold these columns into the row's statistics; the reference is the running maximum."""
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
    row_top = tl.max(top, 0)
    if not IS_FIRST:
        before = tl.load(stats_R4 + row * 4)
        row_top = tl.maximum(row_top, before)
    lane_shift = tl.where(top > float("-inf"), top - row_top, 0.0)
    lane_scale = tl.where(top > float("-inf"), tl.exp(lane_shift), 0.0)
    row_total = tl.sum(lane_scale * total, 0)
    row_weighted = tl.sum(lane_scale * (weighted + lane_shift * total), 0)
    if not IS_FIRST:
        before_shift = tl.where(before > float("-inf"), before - row_top, 0.0)
        before_scale = tl.where(before > float("-inf"), tl.exp(before_shift), 0.0)
        before_total = tl.load(stats_R4 + row * 4 + 1)
        row_total += before_scale * before_total
        row_weighted += before_scale * (tl.load(stats_R4 + row * 4 + 3) + before_shift * before_total)
    tl.store(stats_R4 + row * 4, row_top)
    tl.store(stats_R4 + row * 4 + 1, row_total)
    tl.store(stats_R4 + row * 4 + 3, row_weighted)
    target = tl.load(target_R + row).to(tl.int64) - first_id - first_column
    is_here = (target >= 0) & (target < num_columns) & (first_column + target < num_real)
    target_logit = tl.load(base + target, mask=is_here, other=float("-inf")) * inverse_temperature
    if IS_FIRST:
        tl.store(stats_R4 + row * 4 + 2, target_logit)
    else:
        tl.store(stats_R4 + row * 4 + 2, target_logit, mask=is_here)


@triton.jit
def _write_row(
    base, out, reference, num_columns: tl.constexpr, num_real, inverse_temperature, BLOCK: tl.constexpr
):
    """Store exp(l - reference); give the row's maximum, sum and weighted sum."""
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + lane
        is_real = column < num_real
        value = tl.load(base + column, mask=is_real, other=float("-inf")) * inverse_temperature
        top = tl.maximum(top, value)
        shift = tl.where(is_real, value - reference, 0.0)
        scale = tl.where(is_real, tl.exp(shift), 0.0)
        total += scale
        weighted += scale * shift
        tl.store(out + column, scale.to(out.dtype.element_ty), mask=column < num_columns)
    return tl.max(top, 0), tl.sum(total, 0), tl.sum(weighted, 0)


@triton.jit
def _put_target(spot, value, factor, mask):
    """Store `value` at the target's entry; give `factor` such that factor times what is stored keeps value's digits."""
    rounded = value.to(spot.dtype.element_ty)
    tl.store(spot, rounded, mask=mask)
    kept = rounded.to(tl.float32)
    return tl.where(mask & (kept != 0.0), factor * (value / tl.where(kept != 0.0, kept, 1.0)), factor)


@triton.jit
def _exponentials_kernel(
    logits_RC, row_stride, out_RC, out_stride, stats_R4, results_4R, target_R, first_id, num_columns: tl.constexpr,
    num_real, inverse_temperature, gap, num_rows, IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One pass over the shard's row. The reference is the largest of the first columns and the target; a row whose maximum is
    more than `gap` above it is written again with its maximum. IS_WHOLE: the shard is the vocabulary; finish the row too."""
    row = tl.program_id(0).to(tl.int64)
    base = logits_RC + row * row_stride
    out = out_RC + row * out_stride
    lane = tl.arange(0, BLOCK)
    first = tl.load(base + lane, mask=lane < num_real, other=float("-inf"))
    target = tl.load(target_R + row).to(tl.int64) - first_id
    is_here = (target >= 0) & (target < num_real)
    target_logit = tl.load(base + target, mask=is_here, other=float("-inf")) * inverse_temperature
    reference = tl.maximum(tl.max(first, 0) * inverse_temperature, target_logit)
    reference = tl.where(reference > float("-inf"), reference, 0.0)
    top, total, weighted = _write_row(base, out, reference, num_columns, num_real, inverse_temperature, BLOCK)
    if top - reference > gap:
        reference = top
        top, total, weighted = _write_row(
            base, out, reference, num_columns, num_real, inverse_temperature, BLOCK
        )
    if IS_WHOLE:
        log_total = tl.log(total)
        lse = reference + log_total
        tl.debug_barrier()  # the row is written before its target's entry is
        up = tl.exp(target_logit - reference)
        down = tl.exp(tl.minimum(log_total, _FURTHEST))
        factor = -inverse_temperature * tl.exp(-tl.minimum(log_total, _FURTHEST))
        factor = _put_target(out + target, up - down, factor, is_here)
        results = results_4R + row
        tl.store(results, target_logit - lse)
        tl.store(results + num_rows, lse)
        tl.store(results + num_rows * 2, log_total - weighted / total)
        tl.store(results + num_rows * 3, factor)
    else:
        stats = stats_R4 + row * 4
        tl.store(stats, tl.where(top > float("-inf"), reference, float("-inf")))
        tl.store(stats + 1, total)
        tl.store(stats + 2, target_logit)
        tl.store(stats + 3, weighted)


@triton.jit
def _finish_kernel(
    packed_WR4, kept_RC, kept_stride, target_R, first_id, num_real, results_4R, num_rows, num_kept, rank,
    inverse_temperature, WORLD: tl.constexpr, HAS_KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the shards of a row in rank order (as combine_shards), and put the target into what is kept."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = row < num_rows
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    target_logit = tl.full([BLOCK], float("-inf"), tl.float32)
    for shard in range(WORLD):
        stats = packed_WR4 + (shard * num_rows + row) * 4
        top = tl.maximum(top, tl.load(stats, mask=inside, other=0.0))
        target_logit = tl.maximum(target_logit, tl.load(stats + 2, mask=inside, other=0.0))
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for shard in range(WORLD):
        stats = packed_WR4 + (shard * num_rows + row) * 4
        part = tl.load(stats + 1, mask=inside, other=1.0)
        shift = tl.load(stats, mask=inside, other=0.0) - top
        scale = tl.where(part == 0.0, 0.0, tl.exp(shift))
        shift = tl.where(part == 0.0, 0.0, shift)
        total += scale * part
        weighted += scale * (tl.load(stats + 3, mask=inside, other=0.0) + shift * part)
    log_total = tl.log(total)
    lse = top + log_total
    results = results_4R + row
    tl.store(results, target_logit - lse, mask=inside)
    tl.store(results + num_rows, lse, mask=inside)
    tl.store(results + num_rows * 2, log_total - weighted / total, mask=inside)
    if HAS_KEPT:
        own = packed_WR4 + (rank * num_rows + row) * 4
        is_kept = inside & (row < num_kept)
        column = tl.load(target_R + row, mask=is_kept, other=0).to(tl.int64) - first_id
        is_here = is_kept & (column >= 0) & (column < num_real)
        reference = tl.load(own, mask=is_kept, other=0.0)
        distance = tl.minimum(lse - reference, _FURTHEST)
        up = tl.exp(tl.load(own + 2, mask=is_here, other=0.0) - reference)
        factor = -inverse_temperature * tl.exp(-distance)
        factor = _put_target(kept_RC + row * kept_stride + column, up - tl.exp(distance), factor, is_here)
        tl.store(results + num_rows * 3, factor, mask=is_kept)


@triton.jit
def _grad_kernel(
    logits_RC, row_stride, out_RC, out_stride, target_R, first_id, lse_R, entropy_R, grad_logp_R, grad_entropy_R,
    num_columns, num_real, first_column, inverse_temperature, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient with respect to the raw logits of these columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = (column < num_columns) & (first_column + column < num_real)
    value = tl.load(logits_RC + row * row_stride + column, mask=is_real, other=0.0) * inverse_temperature
    log_p = tl.where(is_real, value - tl.load(lse_R + row), 0.0)
    p = tl.where(is_real, tl.exp(log_p), 0.0)
    target = tl.load(target_R + row).to(tl.int64) - first_id - first_column
    is_target = (column == target) & is_real
    grad = tl.load(grad_logp_R + row) * (tl.where(is_target, 1.0, 0.0) - p)
    if WITH_ENTROPY:
        grad -= tl.load(grad_entropy_R + row) * p * (log_p + tl.load(entropy_R + row))
    grad *= inverse_temperature
    tl.store(out_RC + row * out_stride + column, grad.to(out_RC.dtype.element_ty), mask=column < num_columns)


@triton.jit
def _scale_kernel(source_RC, scale_R, out_RC, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    value = tl.load(source_RC + row * num_columns + column, mask=inside, other=0.0).to(tl.float32)
    scaled = value * tl.load(scale_R + row)
    tl.store(out_RC + row * num_columns + column, scaled.to(out_RC.dtype.element_ty), mask=inside)


def fold_statistics(
    logits_RC: torch.Tensor,
    stats_R4: torch.Tensor,
    target_R: torch.Tensor,
    *,
    first_id: int,
    num_real: int,
    first_column: int,
    inverse_temperature: float,
) -> None:
    """Fold columns first_column ... of the shard into stats_R4 [R, 4] fp32; first_column 0 begins anew.

    logits_RC: fp32 raw logits, rows contiguous. target_R: global ids.
    """
    rows, columns = logits_RC.shape
    if rows:
        _fold_kernel[(rows,)](
            logits_RC, logits_RC.stride(0), stats_R4, target_R, first_id, columns, num_real, first_column,
            inverse_temperature, IS_FIRST=first_column == 0, BLOCK=_block(columns), num_warps=_WARPS,
        )  # fmt: skip


def write_exponentials(
    logits_RC: torch.Tensor,
    out_RC: torch.Tensor,
    target_R: torch.Tensor,
    *,
    stats_R4: torch.Tensor | None,
    results_4R: torch.Tensor,
    first_row: int,
    first_id: int,
    num_real: int,
    inverse_temperature: float,
) -> None:
    """out_RC = exp(l - reference) (0 in padding) in its dtype, for the whole shard, and stats_R4.

    The reference is at most REFERENCE_GAP below the row's maximum, so that bf16 (fp32's range) holds the result.
    stats_R4 None: there are no other shards; then columns first_row ... of results_4R are written as finish_rows does.
    """
    rows, columns = logits_RC.shape
    if rows:
        _exponentials_kernel[(rows,)](
            logits_RC, logits_RC.stride(0), out_RC, out_RC.stride(0), results_4R if stats_R4 is None else stats_R4,
            results_4R[:, first_row:] if first_row else results_4R, target_R, first_id, columns, num_real,
            inverse_temperature, REFERENCE_GAP, results_4R.shape[1], IS_WHOLE=stats_R4 is None, BLOCK=_block(columns),
            num_warps=_WARPS,
        )  # fmt: skip


def finish_rows(
    packed_WR4: torch.Tensor,
    target_R: torch.Tensor,
    kept_RC: torch.Tensor | None,
    results_4R: torch.Tensor,
    *,
    first_id: int,
    num_real: int,
    rank: int,
    inverse_temperature: float,
) -> None:
    """results_4R from every shard's statistics: log-prob, log-sum-exp, entropy, factor of kept rows.

    kept_RC: this rank's exponentials of the first rows; entry [r, target] becomes exp(l - c) - exp(log-sum-exp - c), from
    the fp32 target logit. factor_r kept_RC[r] is the gradient of the log-prob with respect to the raw logits; the factor
    makes up for the rounding of the target's entry, the largest of most rows.
    """
    world, rows, _ = packed_WR4.shape
    if rows:
        _finish_kernel[(triton.cdiv(rows, 128),)](
            packed_WR4, packed_WR4 if kept_RC is None else kept_RC, 0 if kept_RC is None else kept_RC.stride(0),
            target_R, first_id, num_real, results_4R, rows, 0 if kept_RC is None else kept_RC.shape[0], rank,
            inverse_temperature, WORLD=world, HAS_KEPT=kept_RC is not None, BLOCK=128, num_warps=4,
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
    first_id: int,
    num_real: int,
    first_column: int,
    inverse_temperature: float,
) -> None:
    """out_RC = d loss / d raw logits of these columns: the formulas of linear_logprob."""
    rows, columns = logits_RC.shape
    if rows:
        block = _block(columns, most=2048)
        _grad_kernel[(rows, triton.cdiv(columns, block))](
            logits_RC, logits_RC.stride(0), out_RC, out_RC.stride(0), target_R, first_id, lse_R, entropy_R, grad_logp_R,
            grad_logp_R if grad_entropy_R is None else grad_entropy_R, columns, num_real, first_column,
            inverse_temperature, WITH_ENTROPY=grad_entropy_R is not None, BLOCK=block, num_warps=_WARPS,
        )  # fmt: skip


def scale_rows(source_RC: torch.Tensor, scale_R: torch.Tensor, out_RC: torch.Tensor) -> torch.Tensor:
    """out_RC = scale_R[:, None] * source_RC, in fp32 with one rounding; both contiguous. Returns out_RC."""
    rows, columns = source_RC.shape
    if rows * columns <= _SMALL:
        return torch.mul(source_RC, scale_R[:, None], out=out_RC)
    block = _block(columns, most=2048)
    _scale_kernel[(rows, triton.cdiv(columns, block))](
        source_RC, scale_R, out_RC, columns, BLOCK=block, num_warps=_WARPS
    )
    return out_RC


def _block(columns: int, most: int | None = None) -> Any:
    return max(16, min(most or _BLOCK, triton.next_power_of_2(columns)))
