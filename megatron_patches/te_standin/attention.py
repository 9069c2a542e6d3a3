"""DotProductAttention over torch's SDPA: sbhd, bshd and packed thd, thd also with the sequences cut over ranks.

Legend: T packed tokens, N query heads, G key/value heads, D head width, B sequences, L tokens of a sequence.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

UNLIMITED = (-1, -1)
FEW_TOKENS = 2048
"""Sequences at least so long in the mean are worth a kernel launch each."""


class DotProductAttention(torch.nn.Module):
    """softmax(q k^T scale + bias) v with causal, padding and arbitrary masks, windows and grouped queries.

    Packed sequences never see each other. Pads (cu_seqlens_*_padded) give zero rows. cp_group: each packed sequence is 2 N chunks
    of one length for N ranks, and rank r has chunks r and 2 N - 1 - r of it; cu_seqlens are those of whole sequences.
    """

    def __init__(self, num_attention_heads: int, kv_channels: Any, **options: Any) -> None:
        super().__init__()
        for name, plain in (("softmax_type", "vanilla"), ("return_max_logit", False)):
            if options.get(name, plain) != plain:
                raise NotImplementedError(f"{name}={options[name]!r} needs the real transformer_engine")
        width = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        scale = options.get("softmax_scale")
        self.scale = scale if scale is not None else 1.0 / math.sqrt(width)
        self.dropout = options.get("attention_dropout", 0.0)
        self.qkv_format = options.get("qkv_format", "sbhd")
        self.attn_mask_type = options.get("attn_mask_type", "causal")
        self.window_size = options.get("window_size")
        self._rng: Callable[[], Any] | None = options.get("get_rng_state_tracker")
        self._cp_group = options.get("cp_group")

    def set_context_parallel_group(self, cp_group: Any, *ignored: Any) -> None:
        self._cp_group = cp_group

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        core_attention_bias: torch.Tensor | None = None,
        **packed: Any,
    ) -> torch.Tensor:
        layout, mask_type = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        is_causal, is_bottom_right = "causal" in mask_type, "bottom_right" in mask_type
        window = tuple(window_size if window_size is not None else self.window_size or UNLIMITED)
        if self._cp_group is not None and dist.get_world_size(self._cp_group) > 1:
            if layout != "thd" or not is_causal or window != UNLIMITED:
                raise NotImplementedError(
                    "context parallel attention here is causal, packed, without a window"
                )
            return self._cut(q, k, v, packed["cu_seqlens_q"].tolist())
        if layout == "thd":
            return self._packed(q, k, v, is_causal, is_bottom_right, window, packed)
        to_heads = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        mask = attention_mask if mask_type in ("arbitrary", "padding", "padding_causal") else None
        y_BNLD = self._attend(
            *(x.permute(*to_heads) for x in (q, k, v)),
            is_causal=is_causal,
            is_bottom_right=is_bottom_right,
            window=window,
            mask=mask,
            bias=core_attention_bias,
        )
        return (
            y_BNLD.permute(2, 0, 1, 3).flatten(2) if layout == "sbhd" else y_BNLD.transpose(1, 2).flatten(2)
        )

    def _packed(
        self,
        q_TND: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        is_causal: bool,
        is_bottom_right: bool,
        window: tuple[int, ...],
        packed: dict[str, Any],
    ) -> torch.Tensor:
        cu_q, cu_kv = packed["cu_seqlens_q"], packed["cu_seqlens_kv"]
        start_q = _either(packed.get("cu_seqlens_q_padded"), cu_q)
        start_kv = _either(packed.get("cu_seqlens_kv_padded"), cu_kv)
        options: dict[str, Any] = {
            "is_causal": is_causal,
            "is_bottom_right": is_bottom_right,
            "window": window,
        }
        num = cu_q.numel() - 1
        if num * int(packed.get("max_seqlen_q") or 0) == q_TND.shape[0] == k_TGD.shape[0]:
            q, k, v = (x.unflatten(0, (num, -1)).transpose(1, 2) for x in (q_TND, k_TGD, v_TGD))
            return self._attend(q, k, v, **options).transpose(1, 2).flatten(0, 1).flatten(1)
        is_plain = window == UNLIMITED and start_q is cu_q and start_kv is cu_kv and self.dropout == 0.0
        if q_TND.is_cuda and q_TND.dtype != torch.float32 and is_plain:
            if num * FEW_TOKENS <= q_TND.shape[0] and cu_q is cu_kv:
                return _long(q_TND, k_TGD, v_TGD, cu_q.diff().tolist(), is_causal, self.scale)
            return _varlen(q_TND, k_TGD, v_TGD, packed, is_causal, self.scale)
        bounds = [x.tolist() for x in (cu_q, cu_kv, start_q, start_kv)]
        return self._one_by_one(q_TND, k_TGD, v_TGD, bounds, options)

    def _cut(
        self, q_LND: torch.Tensor, k_LGD: torch.Tensor, v_LGD: torch.Tensor, ends: list[int]
    ) -> torch.Tensor:
        """Of this rank's queries; keys and values of all ranks are gathered. L: tokens of this rank."""
        num, rank = dist.get_world_size(self._cp_group), dist.get_rank(self._cp_group)
        index_T = _whole_order(ends, num).to(k_LGD.device)
        k_TGD, v_TGD = (_Gathered.apply(x, self._cp_group)[index_T] for x in (k_LGD, v_LGD))
        start_q, cu_q, start_kv, cu_kv = [0], [0], [0], [0]
        for begin, end in itertools.pairwise(ends):
            length = (end - begin) // (2 * num)
            for chunk in (rank, 2 * num - 1 - rank):
                cu_q.append(cu_q[-1] + length)
                cu_kv.append(cu_kv[-1] + length * (chunk + 1))
                start_q.append(cu_q[-1])
                start_kv[-1] = begin
                start_kv.append(begin)
        options = {"is_causal": True, "is_bottom_right": True, "window": UNLIMITED}
        return self._one_by_one(q_LND, k_TGD, v_TGD, [cu_q, cu_kv, start_q, start_kv], options)

    def _one_by_one(
        self,
        q_TND: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        bounds: list[list[int]],
        options: dict[str, Any],
    ) -> torch.Tensor:
        cu_q, cu_kv, start_q, start_kv = bounds
        parts: list[torch.Tensor] = []
        at = 0
        for i in range(len(cu_q) - 1):
            len_q, len_kv = cu_q[i + 1] - cu_q[i], cu_kv[i + 1] - cu_kv[i]
            if start_q[i] > at:
                parts.append(q_TND.new_zeros(start_q[i] - at, q_TND.shape[1], v_TGD.shape[2]))
            at = start_q[i] + len_q
            if len_q == 0:
                continue
            q = q_TND[start_q[i] : at].transpose(0, 1)[None]
            k, v = (x[start_kv[i] : start_kv[i] + len_kv].transpose(0, 1)[None] for x in (k_TGD, v_TGD))
            parts.append(self._attend(q, k, v, **options)[0].transpose(0, 1))
        if at < q_TND.shape[0]:
            parts.append(q_TND.new_zeros(q_TND.shape[0] - at, q_TND.shape[1], v_TGD.shape[2]))
        return torch.cat(parts, dim=0).flatten(1)

    def _attend(
        self,
        q_BNLD: torch.Tensor,
        k_BGLD: torch.Tensor,
        v_BGLD: torch.Tensor,
        *,
        is_causal: bool,
        is_bottom_right: bool,
        window: tuple[int, ...],
        mask: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        len_q, len_kv = q_BNLD.shape[2], k_BGLD.shape[2]
        has_window = window[0] >= 0 or window[1] > 0
        needs_mask = has_window or mask is not None or bias is not None or (is_causal and len_q != len_kv)
        additive = None
        if needs_mask:
            shift = len_kv - len_q if is_bottom_right else 0
            keep = _visible(len_q, len_kv, shift, is_causal, window, q_BNLD.device)
            keep = keep if mask is None else keep & ~mask
            additive = torch.zeros(keep.shape, dtype=q_BNLD.dtype, device=q_BNLD.device)
            additive = additive.masked_fill(~keep, torch.finfo(q_BNLD.dtype).min)
            additive = additive if bias is None else additive + bias
        dropout = self.dropout if self.training else 0.0
        scope = self._rng().fork() if dropout and self._rng is not None else contextlib.nullcontext()
        with scope:
            return F.scaled_dot_product_attention(
                q_BNLD,
                k_BGLD,
                v_BGLD,
                attn_mask=additive,
                dropout_p=dropout,
                is_causal=is_causal and additive is None,
                scale=self.scale,
                enable_gqa=q_BNLD.shape[1] != k_BGLD.shape[1],
            )


def _whole_order(ends: list[int], num_ranks: int) -> torch.Tensor:
    """[T]: for each token of the whole stream its row among those of all ranks, rank after rank."""
    parts = [torch.empty(0, dtype=torch.int64)]
    for begin, end in itertools.pairwise(ends):
        length = (end - begin) // (2 * num_ranks)
        for chunk in range(2 * num_ranks):
            rank, half = (chunk, 0) if chunk < num_ranks else (2 * num_ranks - 1 - chunk, 1)
            first = rank * (ends[-1] // num_ranks) + begin // num_ranks + half * length
            parts.append(torch.arange(first, first + length))
    return torch.cat(parts)


class _Gathered(torch.autograd.Function):
    """Rows of all ranks, rank after rank; the gradient of a rank's rows is the sum of what all ranks have for them."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.num_rows = group, len(own)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        whole = grads[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.num_rows
        return whole[first : first + ctx.num_rows], None


def _either(first: Any, second: Any) -> Any:
    return second if first is None else first


def _visible(
    len_q: int, len_kv: int, shift: int, is_causal: bool, window: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Boolean [len_q, len_kv]: query i (at position i + shift) may look at key j."""
    i = torch.arange(len_q, device=device)[:, None] + shift
    j = torch.arange(len_kv, device=device)[None]
    keep = torch.ones(len_q, len_kv, dtype=torch.bool, device=device)
    if is_causal:
        keep &= j <= i
    if window[0] >= 0:
        keep &= j >= i - window[0]
    if window[1] >= 0:
        keep &= j <= i + window[1]
    return keep


def _long(
    q_TND: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    lengths: list[int],
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """A sequence after the other, by cuDNN where torch allows it: two thirds of flash attention's time for heads of 256 on Hopper
    (scripts/bench_attention.py), and without copies of the key/value heads."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    outputs = []
    with sdpa_kernel(kernels, set_priority=True):
        for parts in zip(*(x.split(lengths) for x in (q_TND, k_TGD, v_TGD)), strict=True):
            q_1NLD, k_1GLD, v_1GLD = (x.transpose(0, 1)[None] for x in parts)
            y_1NLD = F.scaled_dot_product_attention(
                q_1NLD,
                k_1GLD,
                v_1GLD,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=q_TND.shape[1] != k_TGD.shape[1],
            )
            outputs.append(y_1NLD[0].transpose(0, 1))
    return torch.cat(outputs).flatten(1)


def _varlen(
    q_TND: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    packed: dict[str, Any],
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Flash attention over ragged sequences in one call, without a device synchronisation."""
    if k_TGD.shape[1] != q_TND.shape[1]:
        repeats = q_TND.shape[1] // k_TGD.shape[1]
        k_TGD, v_TGD = (x.repeat_interleave(repeats, dim=1) for x in (k_TGD, v_TGD))
    outputs = torch.ops.aten._flash_attention_forward(
        q_TND,
        k_TGD,
        v_TGD,
        packed["cu_seqlens_q"].int(),
        packed["cu_seqlens_kv"].int(),
        int(packed["max_seqlen_q"]),
        int(packed["max_seqlen_kv"]),
        0.0,
        is_causal,
        False,
        scale=scale,
    )
    return outputs[0].flatten(1)
