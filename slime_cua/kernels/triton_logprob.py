"""linear_logprob on CUDA: matrix products by cuBLAS, everything between them in one Triton pass a block of logits.

Legend: R trained rows, B rows of a block, C vocabulary columns of a block, H hidden size, V rows of this rank's shard.

Kept rows: the forward keeps U = exp(l - c) in the input's precision, c_r a reference near the row's maximum. With
    U[r, target] -= exp(lse_r - c_r) the gradient of the logits is a row scaling of U:  G = s_r U,
    s_r = -grad_r exp(c_r - lse_r) / T. (s_r also makes up for the rounding of U[r, target].) So the backward is two matrix products, dH = s (U W) and dW = U^T (s h), and no
    pass over U at all.
Other rows: nothing of width V is kept; the backward computes logits again in blocks of columns, for parts of the rows.
`fast` keeps all rows, `lean` and `auto` as many as LEAN_KEEP_BYTES and AUTO_KEEP_BYTES hold.
Logits are accumulated and normalised in fp32 everywhere; low precision enters only the backward's products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from slime_cua.kernels import triton_rows
from slime_cua.kernels.torch_logprob import _Head, _matmul, _weight_grad

GIB = 1 << 30
AUTO_KEEP_BYTES = 2 * GIB
LEAN_KEEP_BYTES = 800 << 20
FAST_BLOCK_BYTES = GIB
"""fp32 logits of one block of kept rows, at most; no more than an eighth of what is kept or than the weight's gradient."""
LEAST_ROWS = 512
"""Of a block of kept rows, whatever the vocabulary: with fewer, reading the weight takes longer than the product."""
EARLY_ELEMENTS = 1 << 22
"""Up to R * H of this, the forward also computes U W, which the upstream gradient only scales: while the device works on
it, the CPU, slower than the device at such sizes, gets to the backward."""
LEAN_LOGITS_BYTES = 160 << 20
"""fp32 logits of one block of rows that are not kept."""
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
    head = _Head(weight_VH, temperature, vocab_size, tp_group, block_bytes=0)
    needs_backward = torch.is_grad_enabled() and (hidden_RH.requires_grad or weight_VH.requires_grad)
    num_kept = 0
    if needs_backward and not entropy_grad and hidden_RH.dtype != torch.float16:
        num_kept = _num_kept(memory, hidden_RH.shape[0], weight_VH.shape[0] * hidden_RH.element_size())
    logp_R, entropy_R = _TritonLogprob.apply(
        hidden_RH.contiguous(), weight_VH, target_R.contiguous(), head, entropy_grad, main_grad, num_kept
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
        num_kept: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, is_whole = hidden_RH.shape[0], head.world == 1 and num_kept == hidden_RH.shape[0]
        results_4R = torch.empty(4, num_rows, dtype=torch.float32, device=hidden_RH.device)
        stats_R4 = None
        if not is_whole:
            stats_R4 = torch.empty(num_rows, 4, dtype=torch.float32, device=hidden_RH.device)
        kept_RV = None
        if num_kept:
            spare = weight_VH.nbytes if main_grad is None and weight_VH.requires_grad else 0
            kept_RV = _kept_forward(
                head, hidden_RH[:num_kept], weight_VH, target_R, stats_R4, results_4R, spare
            )
        if stats_R4 is not None:
            rest = slice(num_kept, None)
            if num_kept < num_rows:
                _fold_forward(head, hidden_RH[rest], weight_VH, target_R[rest], stats_R4[rest])
            triton_rows.finish_rows(
                _of_all_shards(head, stats_R4),
                target_R,
                kept_RV,
                results_4R,
                first_id=head.first_id,
                num_real=head.num_real,
                rank=head.rank,
                inverse_temperature=head.inverse_temperature,
            )
        ctx.product_RH = None
        if kept_RV is not None and hidden_RH.requires_grad and hidden_RH.numel() <= EARLY_ELEMENTS:
            ctx.product_RH = _product(
                kept_RV, weight_VH, torch.empty_like(hidden_RH[:num_kept], dtype=torch.float32)
            )
        logp_R, entropy_R = results_4R[0].clone(), results_4R[2].clone()
        ctx.save_for_backward(hidden_RH, weight_VH, target_R, results_4R)
        ctx.head, ctx.entropy_grad, ctx.main_grad = head, entropy_grad, main_grad
        ctx.kept, ctx.num_kept = kept_RV, num_kept
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_R)
        ctx.set_materialize_grads(False)
        return logp_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_R: torch.Tensor | None, grad_entropy_R: torch.Tensor | None) -> Any:
        hidden_RH, weight_VH, target_R, results_4R = ctx.saved_tensors
        _, lse_R, entropy_R, factor_R = results_4R
        head: _Head = ctx.head
        num_kept, num_rows = ctx.num_kept, hidden_RH.shape[0]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if grad_logp_R is None:
            grad_logp_R = torch.zeros_like(lse_R)
        grad_logp_R = grad_logp_R.float().contiguous()
        if num_kept and ctx.kept is None:
            raise RuntimeError("the backward ran twice: what the forward kept is freed by the first one")
        sink = _WeightSink(weight_VH, ctx.main_grad, num_rows) if needs_weight else None
        grad_hidden_RH = torch.empty_like(hidden_RH) if needs_hidden else None
        if num_kept:
            kept = slice(0, num_kept)
            into_RH = None if grad_hidden_RH is None else grad_hidden_RH[kept]
            scale_R = (grad_logp_R * factor_R)[kept]
            _kept_backward(ctx.kept, ctx.product_RH, scale_R, hidden_RH[kept], weight_VH, into_RH, sink)
            ctx.kept = ctx.product_RH = None
        if num_kept < num_rows:
            rest = slice(num_kept, None)
            entropy_part = grad_entropy_R if ctx.entropy_grad else None
            values = (target_R, lse_R, entropy_R, grad_logp_R)
            row_values = [value[rest] for value in values]
            row_values.append(None if entropy_part is None else entropy_part.float().contiguous()[rest])
            into_RH = None if grad_hidden_RH is None else grad_hidden_RH[rest]
            _recomputing_backward(head, row_values, hidden_RH[rest], weight_VH, into_RH, sink)
        if grad_hidden_RH is not None and head.world > 1 and num_rows:
            dist.all_reduce(grad_hidden_RH, group=head.group)
        grad_weight = None if sink is None else _weight_grad(ctx, weight_VH, sink.total_VH, True)
        return grad_hidden_RH, grad_weight, None, None, None, None, None


def _of_all_shards(head: _Head, stats_R4: torch.Tensor) -> torch.Tensor:
    """[W, R, 4]: the one collective of the forward."""
    num_rows = stats_R4.shape[0]
    if head.world == 1 or not num_rows:
        return stats_R4[None]
    flat = stats_R4.new_empty(head.world * num_rows, 4)
    dist.all_gather_into_tensor(flat, stats_R4, group=head.group)
    return flat.view(head.world, num_rows, 4)


def _num_kept(memory: str, num_rows: int, row_bytes: int) -> int:
    """How many rows of U the forward keeps; whole blocks of 128 unless all."""
    if memory == "fast":
        return num_rows
    fit = (LEAN_KEEP_BYTES if memory == "lean" else AUTO_KEEP_BYTES) // max(1, row_bytes)
    return num_rows if fit >= num_rows else fit // 128 * 128


def _kept_forward(
    head: _Head,
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_R: torch.Tensor,
    stats_R4: torch.Tensor | None,
    results_4R: torch.Tensor,
    spare_bytes: int,
) -> torch.Tensor:
    """U [R, V]; statistics or results are written. spare_bytes: what the backward will need beside U anyway."""
    num_rows, num_columns = hidden_RH.shape[0], weight_VH.shape[0]
    kept_RV = hidden_RH.new_empty(num_rows, num_columns)
    least = LEAST_ROWS * num_columns * 4
    block_bytes = min(FAST_BLOCK_BYTES, max(kept_RV.nbytes // 8, LEAN_LOGITS_BYTES, least, spare_bytes))
    block = _rows_within(block_bytes, num_columns, num_rows)
    buffer_BV = torch.empty(block, num_columns, dtype=torch.float32, device=hidden_RH.device)
    for rows in _parts(0, num_rows, block):
        triton_rows.write_exponentials(
            _product(hidden_RH[rows], weight_VH.t(), buffer_BV),
            kept_RV[rows],
            target_R[rows],
            stats_R4=None if stats_R4 is None else stats_R4[rows],
            results_4R=results_4R,
            first_row=rows.start,
            first_id=head.first_id,
            num_real=head.num_real,
            inverse_temperature=head.inverse_temperature,
        )
    return kept_RV


def _kept_backward(
    kept_RV: torch.Tensor,
    product_RH: torch.Tensor | None,
    scale_R: torch.Tensor,
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    into_RH: torch.Tensor | None,
    sink: _WeightSink | None,
) -> None:
    """product_RH: kept_RV @ weight_VH, where the forward has computed it."""
    if sink is not None:
        scaled_RH = triton_rows.scale_rows(hidden_RH, scale_R, torch.empty_like(hidden_RH))
        sink.add(slice(0, weight_VH.shape[0]), kept_RV.t(), scaled_RH, is_first=True)
        del scaled_RH
    if into_RH is not None and product_RH is not None:
        triton_rows.scale_rows(product_RH, scale_R, into_RH)
    elif into_RH is not None:
        num_rows, width = hidden_RH.shape
        block = _rows_within(LEAN_LOGITS_BYTES, width, num_rows)
        buffer_BH = torch.empty(block, width, dtype=torch.float32, device=hidden_RH.device)
        for rows in _parts(0, num_rows, block):
            sum_BH = _product(kept_RV[rows], weight_VH, buffer_BH)
            triton_rows.scale_rows(sum_BH, scale_R[rows], into_RH[rows])


def _fold_forward(
    head: _Head,
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_R: torch.Tensor,
    stats_R4: torch.Tensor,
) -> None:
    """Write the statistics of rows that are not kept."""
    num_rows, num_columns = hidden_RH.shape[0], weight_VH.shape[0]
    block_rows, block_columns = _blocks(num_rows, num_columns, 4, LEAN_LOGITS_BYTES)
    buffer = torch.empty(block_rows * block_columns, dtype=torch.float32, device=hidden_RH.device)
    for rows in _parts(0, num_rows, block_rows):
        for columns in _parts(0, num_columns, block_columns):
            triton_rows.fold_statistics(
                _product(hidden_RH[rows], weight_VH[columns].t(), buffer),
                stats_R4[rows],
                target_R[rows],
                first_id=head.first_id,
                num_real=head.num_real,
                first_column=columns.start,
                inverse_temperature=head.inverse_temperature,
            )


def _recomputing_backward(
    head: _Head,
    row_values: list[torch.Tensor | None],
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    into_RH: torch.Tensor | None,
    sink: _WeightSink | None,
) -> None:
    """row_values: target, log-sum-exp, entropy, gradient of log-prob, gradient of entropy or None."""
    num_rows, num_columns = hidden_RH.shape[0], weight_VH.shape[0]
    block_rows, outer = _blocks(num_rows, num_columns, hidden_RH.element_size(), LEAN_GRAD_BYTES)
    inner = _blocks(block_rows, outer, 4, LEAN_LOGITS_BYTES)[1]
    logits = torch.empty(block_rows * inner, dtype=torch.float32, device=hidden_RH.device)
    grad_buffer = hidden_RH.new_empty(block_rows * outer)
    for rows in _parts(0, num_rows, block_rows):
        values = [None if value is None else value[rows] for value in row_values]
        sum_BH = None
        for columns in _parts(0, num_columns, outer):
            size = (rows.stop - rows.start, columns.stop - columns.start)
            grad_BC = grad_buffer[: size[0] * size[1]].view(size)
            for part in _parts(columns.start, columns.stop, inner):
                triton_rows.write_logit_gradient(
                    _product(hidden_RH[rows], weight_VH[part].t(), logits),
                    grad_BC[:, part.start - columns.start : part.stop - columns.start],
                    *values,  # type: ignore[arg-type]
                    first_id=head.first_id,
                    num_real=head.num_real,
                    first_column=part.start,
                    inverse_temperature=head.inverse_temperature,
                )
            if into_RH is not None:
                sum_BH = _accumulate(sum_BH, grad_BC, weight_VH[columns])
            if sink is not None:
                sink.add(columns, grad_BC.t(), hidden_RH[rows], is_first=sink.is_empty and rows.start == 0)
        if into_RH is not None and sum_BH is not None:
            into_RH[rows] = sum_BH
        if sink is not None:
            sink.is_empty = False


class _WeightSink:
    """Where the weight's gradient is added up: main_grad, or a new tensor in the weight's precision."""

    def __init__(self, weight_VH: torch.Tensor, main_grad: torch.Tensor | None, num_rows: int) -> None:
        self.is_main = main_grad is not None
        self.is_empty = True
        fresh = torch.empty_like if num_rows else torch.zeros_like
        self.total_VH = fresh(weight_VH) if main_grad is None else main_grad

    def add(self, columns: slice, left: torch.Tensor, right: torch.Tensor, *, is_first: bool) -> None:
        """total[columns] += left @ right; is_first: nothing of ours is in these rows yet."""
        into = self.total_VH[columns]
        if is_first and columns == slice(0, self.total_VH.shape[0]):
            self.is_empty = False
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


def _rows_within(num_bytes: int, num_columns: int, num_rows: int) -> int:
    """Rows of a block of fp32 logits: blocks of even size that fit, in multiples of 128 where possible."""
    fit = max(1, num_bytes // (4 * max(1, num_columns)))
    fit = fit // 128 * 128 or fit
    even = -(-num_rows // -(-num_rows // fit))
    return max(1, min(num_rows, fit, -(-even // 128) * 128))


def _parts(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _blocks(num_rows: int, num_columns: int, item_bytes: int, num_bytes: int) -> tuple[int, int]:
    """(rows, columns) of a block within num_bytes: at most LEAN_ROWS rows, columns cut evenly in multiples of 256."""
    rows = max(1, -(-num_rows // -(-num_rows // LEAN_ROWS)))
    fit = max(256, num_bytes // (item_bytes * rows))
    pieces = -(-num_columns // fit)
    even = -(-num_columns // pieces)
    return rows, max(1, min(num_columns, -(-even // 256) * 256))
