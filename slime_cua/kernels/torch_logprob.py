"""The plain torch path of linear_logprob: blocks of rows, logits recomputed in the backward.

Legend: R trained rows, B rows of a block, H hidden size, V rows of this rank's vocabulary shard, W ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

_BLOCK_BYTES = {"lean": 64 << 20, "auto": 128 << 20, "fast": 1 << 30}


def torch_linear_logprob(
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
    block_bytes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See linear_logprob. Works on any device; arguments were checked there. block_bytes: of one block's logits."""
    head = _Head(weight_VH, temperature, vocab_size, tp_group, block_bytes or _BLOCK_BYTES[memory])
    if not target_R.is_cuda and target_R.numel():
        low, high = int(target_R.min()), int(target_R.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"target ids span {low}..{high}; the vocabulary is 0..{vocab_size - 1}: were ids of masked or image positions kept?"
            )
    logp_R, entropy_R = _LinearLogprob.apply(
        hidden_RH, weight_VH, target_R, head, with_entropy, entropy_grad, main_grad
    )
    return logp_R, entropy_R if with_entropy else None


class _Head:
    """Geometry of one rank's shard, and its logits."""

    def __init__(
        self,
        weight_VH: torch.Tensor,
        temperature: float,
        vocab_size: int,
        tp_group: dist.ProcessGroup | None,
        block_bytes: int,
    ) -> None:
        self.group = tp_group
        self.world = dist.get_world_size(tp_group) if tp_group is not None else 1
        self.rank = dist.get_rank(tp_group) if tp_group is not None else 0
        self.num_rows = weight_VH.shape[0]
        self.first_id = self.rank * self.num_rows
        self.num_real = min(max(vocab_size - self.first_id, 0), self.num_rows)
        self.inverse_temperature = 1.0 / temperature
        self.dtype = torch.float64 if weight_VH.dtype == torch.float64 else torch.float32
        self.block_rows = max(1, block_bytes // (self.dtype.itemsize * max(1, self.num_rows)))

    def logits(self, hidden_BH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] over the temperature, accumulated in fp32; padding holds -inf."""
        logits_BV = _matmul(hidden_BH, weight_VH.t(), self.dtype).mul_(self.inverse_temperature)
        logits_BV[:, self.num_real :] = float("-inf")
        return logits_BV

    def local_target(self, target_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(index into this shard, is it in this shard) of global ids; the index is 0 where it is not."""
        local_B = target_B.long() - self.first_id
        is_here_B = (local_B >= 0) & (local_B < self.num_real)
        return torch.where(is_here_B, local_B, 0), is_here_B


def _matmul(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """left @ right accumulated and returned in `dtype`; low-precision inputs stay low on CUDA's tensor cores.

    Autocast is off in here: it would round fp32 operands and logits.
    """
    with torch.autocast(left.device.type, enabled=False):
        if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(left, right, out_dtype=dtype)
        return left.to(dtype) @ right.to(dtype)


def _shard_statistics(
    head: _Head, hidden_RH: torch.Tensor, weight_VH: torch.Tensor, target_R: torch.Tensor, with_entropy: bool
) -> torch.Tensor:
    """[R, 4] of this shard: max logit m, sum exp(l - m), logit of the target (-inf if elsewhere), sum exp(l - m) (l - m)."""
    packed_R4 = torch.zeros(hidden_RH.shape[0], 4, dtype=head.dtype, device=hidden_RH.device)
    for start in range(0, hidden_RH.shape[0], head.block_rows):
        rows = slice(start, start + head.block_rows)
        logits_BV = head.logits(hidden_RH[rows], weight_VH)
        local_B, is_here_B = head.local_target(target_R[rows])
        target_logit_B = logits_BV.gather(1, local_B[:, None])[:, 0]
        packed_R4[rows, 2] = torch.where(is_here_B, target_logit_B, float("-inf"))
        if head.num_real == 0:
            packed_R4[rows, 0] = float("-inf")
            continue
        max_B = logits_BV.amax(dim=1)
        packed_R4[rows, 0] = max_B
        real_BV = logits_BV[:, : head.num_real].sub_(max_B[:, None])
        weights_BV = real_BV.exp()
        packed_R4[rows, 1] = weights_BV.sum(dim=1)
        if with_entropy:
            packed_R4[rows, 3] = weights_BV.mul_(real_BV).sum(dim=1)
    return packed_R4


def combine_shards(packed_WR4: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-sum-exp, target logit, entropy) [R] of the whole vocabulary, from each shard's four numbers a row.

    With M = max_w m_w and c_w = exp(m_w - M):  Z = sum_w c_w s_w;  lse = M + log Z;
    sum_v exp(l - M)(l - M) = sum_w c_w (e_w + (m_w - M) s_w);  entropy = log Z - that / Z.
    """
    max_WR, sum_WR, target_WR, weighted_WR = packed_WR4.unbind(dim=-1)
    top_R = max_WR.amax(dim=0)
    shift_WR = torch.where(sum_WR > 0, max_WR - top_R, 0.0)
    scale_WR = torch.where(sum_WR > 0, shift_WR.exp(), 0.0)
    total_R = (scale_WR * sum_WR).sum(dim=0)
    mean_R = (scale_WR * (weighted_WR + shift_WR * sum_WR)).sum(dim=0) / total_R
    log_total_R = total_R.log()
    return top_R + log_total_R, target_WR.amax(dim=0), log_total_R - mean_R


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: torch.Tensor,
        weight_VH: torch.Tensor,
        target_R: torch.Tensor,
        head: _Head,
        with_entropy: bool,
        entropy_grad: bool,
        main_grad: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed_R4 = _shard_statistics(head, hidden_RH, weight_VH, target_R, with_entropy)
        if head.world > 1 and packed_R4.shape[0]:
            packed_WR4 = packed_R4.new_empty(head.world * packed_R4.shape[0], 4)
            dist.all_gather_into_tensor(packed_WR4, packed_R4, group=head.group)
            packed_WR4 = packed_WR4.view(head.world, -1, 4)
        else:
            packed_WR4 = packed_R4[None]
        lse_R, target_logit_R, entropy_R = combine_shards(packed_WR4)
        ctx.save_for_backward(hidden_RH, weight_VH, target_R, lse_R, entropy_R)
        ctx.head, ctx.entropy_grad, ctx.main_grad = head, entropy_grad, main_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_R)
        ctx.set_materialize_grads(False)
        return target_logit_R - lse_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_R: torch.Tensor | None, grad_entropy_R: torch.Tensor | None) -> Any:
        hidden_RH, weight_VH, target_R, lse_R, entropy_R = ctx.saved_tensors
        head: _Head = ctx.head
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_RH = torch.zeros_like(hidden_RH, dtype=head.dtype) if needs_hidden else None
        into: torch.Tensor | None = ctx.main_grad
        if needs_weight and into is None:
            into = torch.zeros_like(weight_VH, dtype=head.dtype)
        for start in range(0, hidden_RH.shape[0], head.block_rows):
            rows = slice(start, start + head.block_rows)
            grad_BV = _grad_logits(
                head,
                head.logits(hidden_RH[rows], weight_VH),
                target_R[rows],
                lse_R[rows],
                entropy_R[rows],
                None if grad_logp_R is None else grad_logp_R[rows],
                grad_entropy_R[rows] if ctx.entropy_grad and grad_entropy_R is not None else None,
            ).to(hidden_RH.dtype if hidden_RH.is_cuda else head.dtype)
            if grad_hidden_RH is not None:
                grad_hidden_RH[rows] = _matmul(grad_BV, weight_VH, head.dtype)
            if needs_weight and into is not None:
                into.add_(_matmul(grad_BV.t(), hidden_RH[rows], head.dtype))
        if grad_hidden_RH is not None:
            if head.world > 1 and grad_hidden_RH.shape[0]:
                dist.all_reduce(grad_hidden_RH, group=head.group)
            grad_hidden_RH = grad_hidden_RH.to(hidden_RH.dtype)
        return grad_hidden_RH, _weight_grad(ctx, weight_VH, into, needs_weight), None, None, None, None, None


def _grad_logits(
    head: _Head,
    logits_BV: torch.Tensor,
    target_B: torch.Tensor,
    lse_B: torch.Tensor,
    entropy_B: torch.Tensor,
    grad_logp_B: torch.Tensor | None,
    grad_entropy_B: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient with respect to the raw logits (before the temperature) [B, V]; overwrites logits_BV."""
    log_p_BV = logits_BV.sub_(lse_B[:, None])
    p_BV = log_p_BV.exp()
    grad_BV = torch.zeros_like(p_BV)
    if grad_entropy_B is not None:
        log_p_BV[:, head.num_real :] = 0.0
        grad_BV -= grad_entropy_B[:, None] * p_BV * (log_p_BV + entropy_B[:, None])
    if grad_logp_B is not None:
        grad_BV -= grad_logp_B[:, None] * p_BV
        local_B, is_here_B = head.local_target(target_B)
        grad_BV.scatter_add_(1, local_B[:, None], torch.where(is_here_B, grad_logp_B, 0.0)[:, None])
    return grad_BV.mul_(head.inverse_temperature)


def _weight_grad(
    ctx: Any, weight_VH: torch.Tensor, into: torch.Tensor | None, needs_weight: bool
) -> torch.Tensor | None:
    if not needs_weight or into is None:
        return None
    if ctx.main_grad is None:
        return into.to(weight_VH.dtype)
    if hasattr(weight_VH, "grad_added_to_main_grad"):
        weight_VH.grad_added_to_main_grad = True
        return torch.zeros_like(weight_VH)
    return None
