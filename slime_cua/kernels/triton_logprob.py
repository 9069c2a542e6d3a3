"""linear_logprob on CUDA: matrix products by cuBLAS, everything between them in one Triton pass a block of logits.

Legend: R trained rows, B rows of a block, C vocabulary columns of a block, H hidden size, V rows of this rank's shard.

fast: the forward keeps U = exp(l - max) in the input's precision [R, V]. Put U[r, target] -= 1 / c_r with
      c_r = exp(max_r - lse_r), then the gradient of the logits is row scaling times U:  G = s_r U,  s_r = -grad_r c_r / T.
      So the backward is two matrix products, dH = s (U W) and dW = U^T (s h), and no pass over [R, V] at all.
lean: nothing of size [R, V] is kept. The backward recomputes logits in blocks of columns for halves of the rows.
Logits are accumulated and normalised in fp32 in both; low precision enters only the backward's products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from slime_cua.kernels import triton_rows
from slime_cua.kernels.torch_logprob import _Head, _matmul, _weight_grad, combine_shards

GIB = 1 << 30
AUTO_FAST_BYTES = 2 * GIB
"""`auto` keeps U up to this size, and is lean beyond."""
FAST_BLOCK_BYTES = GIB
"""fp32 logits of one row block in the forward of `fast`."""
LEAN_LOGITS_BYTES = 160 << 20
"""fp32 logits of one block in `lean`."""
LEAN_ROWS = 16384
"""Rows whose hidden gradient is accumulated in fp32 at once."""
LEAN_GRAD_BYTES = 416 << 20
"""Low-precision logit gradients of one column block."""


def triton_linear_logprob(
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_R: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    with_entropy: bool,
    entropy_grad: bool,
    main_grad: torch.Tensor | None,
    memory: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See linear_logprob; arguments were checked there. `with_entropy=False` saves nothing here."""
    head = _Head(weight_VH, temperature, vocab_size, tp_group, memory)
    kept_bytes = hidden_RH.shape[0] * weight_VH.shape[0] * hidden_RH.element_size()
    needs_backward = torch.is_grad_enabled() and (hidden_RH.requires_grad or weight_VH.requires_grad)
    is_fast = memory == "fast" or (memory == "auto" and kept_bytes <= AUTO_FAST_BYTES)
    is_fast = is_fast and needs_backward and not entropy_grad and hidden_RH.dtype != torch.float16
    logp_R, entropy_R = _TritonLogprob.apply(
        hidden_RH.contiguous(), weight_VH, target_R, head, entropy_grad, main_grad, is_fast
    )
    return logp_R, entropy_R if with_entropy else None


class _TritonLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: torch.Tensor,
        weight_VH: torch.Tensor,
        target_R: torch.Tensor,
        head: _Head,
        entropy_grad: bool,
        main_grad: torch.Tensor | None,
        is_fast: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        local_R = target_R.long() - head.first_id
        ctx.kept = None
        if is_fast:
            stats_R4, ctx.kept = _fast_forward(head, hidden_RH, weight_VH, local_R)
        else:
            stats_R4 = _lean_forward(head, hidden_RH, weight_VH, local_R)
        packed_WR4 = stats_R4[None]
        if head.world > 1 and stats_R4.shape[0]:
            flat = stats_R4.new_empty(head.world * stats_R4.shape[0], 4)
            dist.all_gather_into_tensor(flat, stats_R4, group=head.group)
            packed_WR4 = flat.view(head.world, -1, 4)
        lse_R, target_logit_R, entropy_R = combine_shards(packed_WR4)
        if ctx.kept is not None:
            _subtract_target(head, ctx.kept, stats_R4, lse_R, local_R)
        ctx.save_for_backward(hidden_RH, weight_VH, local_R, lse_R, entropy_R, stats_R4[:, 0].contiguous())
        ctx.head, ctx.entropy_grad, ctx.main_grad, ctx.is_fast = head, entropy_grad, main_grad, is_fast
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_R)
        ctx.set_materialize_grads(False)
        return target_logit_R - lse_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_R: torch.Tensor | None, grad_entropy_R: torch.Tensor | None) -> Any:
        hidden_RH, weight_VH, local_R, lse_R, entropy_R, top_R = ctx.saved_tensors
        head: _Head = ctx.head
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if grad_logp_R is None:
            grad_logp_R = torch.zeros_like(lse_R)
        grad_logp_R = grad_logp_R.float().contiguous()
        sink = _WeightSink(weight_VH, ctx.main_grad) if needs_weight else None
        if ctx.is_fast:
            if ctx.kept is None:
                raise RuntimeError('the backward ran twice: memory="fast" frees its copy; use memory="lean"')
            scale_R = -grad_logp_R * (-_distance(top_R, lse_R)).exp() * head.inverse_temperature
            grad_hidden_RH = _fast_backward(ctx.kept, scale_R, hidden_RH, weight_VH, needs_hidden, sink)
            ctx.kept = None
        else:
            entropy_part = grad_entropy_R if ctx.entropy_grad else None
            grads = (grad_logp_R, None if entropy_part is None else entropy_part.float().contiguous())
            rows = (local_R, lse_R, entropy_R)
            grad_hidden_RH = _lean_backward(head, rows, grads, hidden_RH, weight_VH, needs_hidden, sink)
        if grad_hidden_RH is not None and head.world > 1 and grad_hidden_RH.shape[0]:
            dist.all_reduce(grad_hidden_RH, group=head.group)
        grad_weight = None if sink is None else _weight_grad(ctx, weight_VH, sink.total_VH, True)
        return grad_hidden_RH, grad_weight, None, None, None, None, None


def _fast_forward(
    head: _Head, hidden_RH: torch.Tensor, weight_VH: torch.Tensor, local_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(statistics [R, 4], U [R, V])."""
    num_rows, num_columns = hidden_RH.shape[0], weight_VH.shape[0]
    kept_RV = hidden_RH.new_empty(num_rows, num_columns)
    stats_R4 = _empty_statistics(num_rows, hidden_RH.device)
    block = _rows_within(FAST_BLOCK_BYTES, num_columns, num_rows)
    buffer_BV = torch.empty(block, num_columns, dtype=torch.float32, device=hidden_RH.device)
    for start in range(0, num_rows, block):
        rows = slice(start, min(start + block, num_rows))
        logits_BV = _product(hidden_RH[rows], weight_VH.t(), buffer_BV[: rows.stop - rows.start])
        triton_rows.write_exponentials(
            logits_BV,
            kept_RV[rows],
            stats_R4[rows],
            local_R[rows],
            num_real=head.num_real,
            inverse_temperature=head.inverse_temperature,
        )
    return stats_R4, kept_RV


def _subtract_target(
    head: _Head, kept_RV: torch.Tensor, stats_R4: torch.Tensor, lse_R: torch.Tensor, local_R: torch.Tensor
) -> None:
    """U[r, target] = exp(l - max) - 1 / c where the target is in this shard; from the fp32 target logit."""
    is_here_R = (local_R >= 0) & (local_R < head.num_real)
    column_R = torch.where(is_here_R, local_R, 0)[:, None]
    with_target_R = (stats_R4[:, 2] - stats_R4[:, 0]).exp() - _distance(stats_R4[:, 0], lse_R).exp()
    before_R = kept_RV.gather(1, column_R)[:, 0]
    kept_RV.scatter_(1, column_R, torch.where(is_here_R, with_target_R.to(kept_RV.dtype), before_R)[:, None])


def _distance(top_R: torch.Tensor, lse_R: torch.Tensor) -> torch.Tensor:
    """log(1 / c): how far the shard's maximum is below the log-sum-exp, at most 60.

    Further down every probability of the shard is below exp(-60) and rounds to nothing beside the target's 1, while
    1 / c itself would leave the range of bf16.
    """
    return (lse_R - top_R).clamp(max=60.0)


def _fast_backward(
    kept_RV: torch.Tensor,
    scale_R: torch.Tensor,
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    needs_hidden: bool,
    sink: _WeightSink | None,
) -> torch.Tensor | None:
    if sink is not None:
        scaled_RH = triton_rows.scale_rows(hidden_RH, scale_R, torch.empty_like(hidden_RH))
        sink.add(slice(0, weight_VH.shape[0]), kept_RV.t(), scaled_RH, is_first=True)
        del scaled_RH
    if not needs_hidden:
        return None
    grad_RH = torch.mm(kept_RV, weight_VH)
    return triton_rows.scale_rows(grad_RH, scale_R, grad_RH)


def _lean_forward(
    head: _Head, hidden_RH: torch.Tensor, weight_VH: torch.Tensor, local_R: torch.Tensor
) -> torch.Tensor:
    num_rows, num_columns = hidden_RH.shape[0], weight_VH.shape[0]
    stats_R4 = _empty_statistics(num_rows, hidden_RH.device)
    block_rows, block_columns = _lean_blocks(num_rows, num_columns, 4, LEAN_LOGITS_BYTES * 2)
    buffer = torch.empty(block_rows * block_columns, dtype=torch.float32, device=hidden_RH.device)
    for start in range(0, num_rows, block_rows):
        rows = slice(start, min(start + block_rows, num_rows))
        for first in range(0, num_columns, block_columns):
            columns = slice(first, min(first + block_columns, num_columns))
            logits_BC = _product(hidden_RH[rows], weight_VH[columns].t(), buffer)
            triton_rows.fold_statistics(
                logits_BC,
                stats_R4[rows],
                local_R[rows],
                num_real=head.num_real,
                first_column=first,
                inverse_temperature=head.inverse_temperature,
            )
    return stats_R4


def _lean_backward(
    head: _Head,
    row_values: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grads: tuple[torch.Tensor, torch.Tensor | None],
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    needs_hidden: bool,
    sink: _WeightSink | None,
) -> torch.Tensor | None:
    num_rows, num_columns = hidden_RH.shape[0], weight_VH.shape[0]
    grad_RH = torch.zeros_like(hidden_RH) if needs_hidden else None
    block_rows, outer = _lean_blocks(num_rows, num_columns, hidden_RH.element_size(), LEAN_GRAD_BYTES)
    inner = _lean_blocks(block_rows, outer, 4, LEAN_LOGITS_BYTES)[1]
    logits = torch.empty(block_rows * inner, dtype=torch.float32, device=hidden_RH.device)
    grad_buffer = hidden_RH.new_empty(block_rows * outer)
    for start in range(0, num_rows, block_rows):
        rows = slice(start, min(start + block_rows, num_rows))
        size = rows.stop - rows.start
        sum_BH = None
        for first in range(0, num_columns, outer):
            columns = slice(first, min(first + outer, num_columns))
            grad_BC = grad_buffer[: size * (columns.stop - first)].view(size, -1)
            for begin in range(first, columns.stop, inner):
                part = slice(begin, min(begin + inner, columns.stop))
                triton_rows.write_logit_gradient(
                    _product(hidden_RH[rows], weight_VH[part].t(), logits),
                    grad_BC[:, begin - first : part.stop - first],
                    *(value[rows] for value in row_values),
                    grads[0][rows],
                    None if grads[1] is None else grads[1][rows],
                    num_real=head.num_real,
                    first_column=begin,
                    inverse_temperature=head.inverse_temperature,
                )
            if grad_RH is not None:
                sum_BH = _accumulate(sum_BH, grad_BC, weight_VH[columns])
            if sink is not None:
                sink.add(columns, grad_BC.t(), hidden_RH[rows], is_first=start == 0)
        if grad_RH is not None and sum_BH is not None:
            grad_RH[rows] = sum_BH.to(grad_RH.dtype)
    return grad_RH


class _WeightSink:
    """Where the weight's gradient is added up: main_grad, or a new tensor in the weight's precision."""

    def __init__(self, weight_VH: torch.Tensor, main_grad: torch.Tensor | None) -> None:
        self.is_main = main_grad is not None
        self.total_VH = torch.zeros_like(weight_VH) if main_grad is None else main_grad

    def add(self, columns: slice, left: torch.Tensor, right: torch.Tensor, *, is_first: bool) -> None:
        """total[columns] += left @ right; is_first: nothing of ours is in these rows yet."""
        into = self.total_VH[columns]
        if not self.is_main and is_first:
            torch.mm(left, right, out=into)
        elif into.dtype == right.dtype:
            into.addmm_(left, right)
        elif into.dtype == torch.float32 and right.is_cuda:
            torch.addmm(into, left, right, out_dtype=torch.float32, out=into)
        else:
            into.add_(_matmul(left, right, torch.float32))


def _accumulate(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """total + left @ right in fp32, in place where there is a total."""
    if total is None:
        return _matmul(left, right, torch.float32)
    if left.is_cuda and left.dtype != torch.float32:
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    return total.addmm_(left.float(), right.float())


def _product(left: torch.Tensor, right: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """left @ right in fp32, inside `buffer`."""
    out = buffer.view(-1)[: left.shape[0] * right.shape[1]].view(left.shape[0], right.shape[1])
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return torch.mm(left.float(), right.float(), out=out)


def _empty_statistics(num_rows: int, device: torch.device) -> torch.Tensor:
    """[R, 4] of an empty shard: max -inf, sum 0, target logit -inf, weighted sum 0."""
    stats_R4 = torch.zeros(num_rows, 4, dtype=torch.float32, device=device)
    stats_R4[:, 0] = float("-inf")
    stats_R4[:, 2] = float("-inf")
    return stats_R4


def _rows_within(num_bytes: int, num_columns: int, num_rows: int) -> int:
    """Rows of fp32 logits that fit, a multiple of 128 where possible."""
    fit = max(1, num_bytes // (4 * max(1, num_columns)))
    return max(1, min(num_rows, fit // 128 * 128 or fit))


def _lean_blocks(num_rows: int, num_columns: int, item_bytes: int, num_bytes: int) -> tuple[int, int]:
    """(rows, columns) of a block within num_bytes: at most LEAN_ROWS rows, evenly cut columns in multiples of 256."""
    rows = max(1, min(num_rows, LEAN_ROWS))
    fit = max(256, num_bytes // (item_bytes * rows))
    pieces = -(-num_columns // fit)
    even = -(-num_columns // pieces)
    return rows, max(1, min(num_columns, -(-even // 256) * 256))
