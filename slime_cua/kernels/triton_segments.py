"""segment_log_ratio as Triton kernels: on CUDA, and on CPU under TRITON_INTERPRET=1.

Legend: T packed tokens, K action steps, S segments. A step's tokens may lie anywhere; the kernels read from its first to its
last, so that a packed batch is read once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from slime_cua.algo.reduce import StepMap
from slime_cua.kernels.segment_ratio import RATIO_BOUND

_BLOCK = 1024


@triton.jit
def _span_kernel(step_T, is_kept_T, span_2K, num_tokens, num_steps, BLOCK: tl.constexpr):
    """span_2K: least index of each step's tokens, and least negative index."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.load(is_kept_T + index, mask=index < num_tokens, other=0) != 0
    step = tl.load(step_T + index, mask=kept, other=0)
    tl.atomic_min(span_2K + step, index, mask=kept)
    tl.atomic_min(span_2K + num_steps + step, -index, mask=kept)


@triton.jit
def _sums_kernel(
    logp_T, old_logp_T, step_T, is_kept_T, span_2K, sums_K2, num_tokens, num_steps, bound, BLOCK: tl.constexpr
):
    """Sum of the log-ratio and of k3 over the tokens of one step, in float64."""
    mine = tl.program_id(0)
    start = tl.load(span_2K + mine)
    last = -tl.load(span_2K + num_steps + mine)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    k3 = tl.zeros([BLOCK], tl.float64)
    while start <= last:
        index = start + lane
        inside = index < num_tokens
        kept = tl.load(is_kept_T + index, mask=inside, other=0) != 0
        kept = kept & (tl.load(step_T + index, mask=inside, other=-1) == mine)
        delta = tl.load(logp_T + index, mask=kept, other=0.0).to(tl.float64)
        delta -= tl.load(old_logp_T + index, mask=kept, other=0.0).to(tl.float64)
        bounded = tl.minimum(tl.maximum(delta, -bound), bound)
        total += delta
        k3 += tl.exp(bounded) - 1.0 - bounded
        start += BLOCK
    tl.store(sums_K2 + mine * 2, tl.sum(total, 0))
    tl.store(sums_K2 + mine * 2 + 1, tl.sum(k3, 0))


@triton.jit
def _segments_kernel(sums_K2, count_K, coefficient_K, segment_K, log_w_S, num_steps, BLOCK: tl.constexpr):
    """sum_k coefficient_k sum_k / count_k over the steps of one segment."""
    mine = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    start = tl.program_id(1)  # 0: the grid has one axis
    while start < num_steps:
        step = start + lane
        is_mine = tl.load(segment_K + step, mask=step < num_steps, other=-1) == mine
        count = tl.load(count_K + step, mask=is_mine, other=0.0).to(tl.float64)
        is_mine = is_mine & (count > 0)
        share = tl.load(coefficient_K + step, mask=is_mine, other=0.0).to(tl.float64)
        mean = tl.load(sums_K2 + step * 2, mask=is_mine, other=0.0) / tl.where(count > 0, count, 1.0)
        total += share * mean
        start += BLOCK
    tl.store(log_w_S + mine, tl.sum(total, 0).to(log_w_S.dtype.element_ty))


@triton.jit
def _tokens_kernel(
    grad_S, step_T, is_kept_T, segment_K, count_K, coefficient_K, grad_T, num_tokens, BLOCK: tl.constexpr
):
    """Gradient of one token's log-prob: its segment's times coefficient / count."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_tokens
    kept = inside & (tl.load(is_kept_T + index, mask=inside, other=0) != 0)
    step = tl.load(step_T + index, mask=kept, other=0)
    segment = tl.load(segment_K + step, mask=kept, other=0)
    share = tl.load(coefficient_K + step, mask=kept, other=0.0).to(tl.float64)
    share = share / tl.load(count_K + step, mask=kept, other=1.0).to(tl.float64)
    grad = tl.load(grad_S + segment, mask=kept, other=0.0).to(tl.float64) * share
    tl.store(grad_T + index, tl.where(kept, grad, 0.0).to(grad_T.dtype.element_ty), mask=inside)


def triton_segment_log_ratio(
    logp_T: torch.Tensor, old_logp_T: torch.Tensor, steps: StepMap
) -> tuple[torch.Tensor, torch.Tensor]:
    """See segment_log_ratio; at least one token, step and segment."""
    result: tuple[torch.Tensor, torch.Tensor] = _SegmentLogRatio.apply(logp_T, old_logp_T.detach(), steps)
    return result


class _SegmentLogRatio(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logp_T: torch.Tensor, old_logp_T: torch.Tensor, steps: StepMap
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, num_steps = logp_T.shape[0], steps.num_steps
        kept_T = steps.is_kept_T.to(torch.int8)
        span_2K = torch.full((2 * num_steps,), num_tokens, dtype=torch.int32, device=logp_T.device)
        grid = (triton.cdiv(num_tokens, _BLOCK),)
        _span_kernel[grid](steps.step_T, kept_T, span_2K, num_tokens, num_steps, BLOCK=_BLOCK)
        sums_K2 = torch.empty(num_steps, 2, dtype=torch.float64, device=logp_T.device)
        _sums_kernel[(num_steps,)](
            logp_T.contiguous(), old_logp_T.contiguous(), steps.step_T, kept_T, span_2K, sums_K2, num_tokens, num_steps,
            RATIO_BOUND, BLOCK=_BLOCK,
        )  # fmt: skip
        if steps.cp_group is not None and dist.get_world_size(steps.cp_group) > 1:
            dist.all_reduce(sums_K2, group=steps.cp_group)
        log_w_S = torch.empty(steps.num_segments, dtype=logp_T.dtype, device=logp_T.device)
        _segments_kernel[(steps.num_segments,)](
            sums_K2, steps.count_K, steps.coefficient_K, steps.segment_K, log_w_S, num_steps, BLOCK=_BLOCK
        )
        mean_K2 = (sums_K2 / steps.count_K.double().clamp(min=1.0)[:, None]).to(logp_T.dtype)
        ctx.mark_non_differentiable(mean_K2)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(kept_T)
        ctx.steps, ctx.dtype = steps, logp_T.dtype
        return log_w_S, mean_K2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_S: torch.Tensor | None, _: Any) -> Any:
        if grad_S is None:
            return None, None, None
        (kept_T,) = ctx.saved_tensors
        steps: StepMap = ctx.steps
        num_tokens = kept_T.shape[0]
        grad_T = torch.empty(num_tokens, dtype=ctx.dtype, device=kept_T.device)
        _tokens_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
            grad_S.contiguous(), steps.step_T, kept_T, steps.segment_K, steps.count_K, steps.coefficient_K, grad_T,
            num_tokens, BLOCK=_BLOCK,
        )  # fmt: skip
        return grad_T, None, None
