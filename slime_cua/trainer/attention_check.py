"""Does the attention kernel of this machine compute right gradients for packed sequences? Asked once, before anything is trained.

Transformer Engine 2.11.0 once did not on an H200 that has a cuDNN besides torch's: the output was right (0.002 from float64), the query
gradient 0.20 away and those of keys and values NaN. With torch's cuDNN alone (megatron_patches.one_cudnn) it was right. Where attention is
wrong or fails all the same, it alone is replaced by the plain one of megatron_patches, and linear layers and norms stay.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.te_standin.attention import DotProductAttention
from slime_cua.core.errors import ConfigError
from slime_cua.trainer.context import own_tokens

logger = logging.getLogger(__name__)

LENGTHS = (700, 1337)
"""Tokens of the two packed sequences: those at which wrong gradients were seen. Both span several tiles of a kernel and end within one."""
MAX_DISTANCE = 0.05
"""Relative distance of output and gradients to float32; bf16 rounding is below 0.01."""


def settle_packed_attention(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Ask the model's packed attention; where Transformer Engine's is wrong or fails, put the plain one in its place, in every layer.

    ConfigError when the plain one is wrong, too. A collective: what one rank finds wrong all ranks replace.
    """
    layers = _layers(model)
    if not layers or isinstance(layers[0], DotProductAttention):
        check_packed_attention(model, dtype, device)
        return
    fault = ""
    try:
        check_packed_attention(model, dtype, device)
    except Exception as error:  # libraries that do not fit each other end as any of them
        fault = f"{type(error).__name__}: {error}"
    if not _is_any_rank(bool(fault), device):
        return
    for layer in layers:
        layer.forward = _plain_forward(layer.config)
    check_packed_attention(model, dtype, device)
    logger.warning("attention of megatron_patches takes the place of Transformer Engine's: %s", fault)


def _is_any_rank(flag: bool, device: torch.device) -> bool:
    if not dist.is_initialized():
        return flag
    answer = torch.tensor([int(flag)], device=device)
    dist.all_reduce(answer, op=dist.ReduceOp.MAX)
    return bool(answer.item())


def _layers(model: torch.nn.Module) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__ == "TEDotProductAttention"]


def _plain_forward(config: Any) -> Callable[..., torch.Tensor]:
    """Megatron's call of packed attention, answered by the plain one."""
    group = None
    if config.context_parallel_size > 1:
        from megatron.core import mpu

        group = mpu.get_context_parallel_group()
    plain = DotProductAttention(
        config.num_attention_heads,
        config.kv_channels,
        softmax_scale=getattr(config, "softmax_scale", None),
        cp_group=group,
    )

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
        packed = {name: getattr(packed_seq_params, name) for name in names}
        result: torch.Tensor = plain(
            query, key, value, qkv_format="thd", attn_mask_type=attn_mask_type.name, **packed
        )
        return result

    return forward


def check_packed_attention(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """ConfigError unless output and gradients of the model's packed attention agree with plain attention in float32.

    Asks the first TEDotProductAttention of `model`, on random queries, keys and values of its head counts; nothing is kept. A
    collective where sequences are cut over context-parallel ranks: each asks for its own tokens.
    """
    layers = _layers(model)
    if not layers:
        return
    layer = layers[0]
    apart = _distances(layer, dtype, device)
    worst = max(apart, key=lambda name: apart[name] if math.isfinite(apart[name]) else math.inf)
    if not apart[worst] <= MAX_DISTANCE:
        raise ConfigError(
            f"packed attention is wrong on this machine: {worst} is {apart[worst]:.3f} away from float32 "
            f"(relative; at most {MAX_DISTANCE}) with {layer.config.num_attention_heads} heads of {layer.config.kv_channels}. "
            "Set CUDNN_HOME to the cuDNN of torch, or choose another kernel of Transformer Engine (NVTE_FUSED_ATTN=0 or NVTE_FLASH_ATTN=0), "
            "another release, or another torch"
        )


def _distances(layer: Any, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Relative distance of output, dq, dk and dv to plain attention in float32."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    config = layer.config
    size, cp = config.tensor_model_parallel_size, config.context_parallel_size
    heads, groups = config.num_attention_heads // size, max(1, config.num_query_groups // size)
    lengths = [length + (-length % (2 * cp) if cp > 1 else 0) for length in LENGTHS]
    draw, total = torch.Generator().manual_seed(0), sum(lengths)
    start = [
        torch.randn(total, count, config.kv_channels, generator=draw).to(device, dtype)
        for count in (heads, groups, groups)
    ]
    upstream = torch.randn(total, heads * config.kv_channels, generator=draw).to(device, dtype)
    own = _own(lengths, cp)
    ends = torch.tensor([0, lengths[0], total], dtype=torch.int32, device=device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(
            q, k, v, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=packed
        )
        return result

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _plain(q, k, v, lengths)

    found = _with_gradients(kernel, [x[own] for x in start], upstream[own])
    truth = [x[own] for x in _with_gradients(plain, [x.float() for x in start], upstream.float())]
    names = ("the output", "the gradient of queries", "the gradient of keys", "the gradient of values")
    return {
        name: float((a.float() - b).norm() / b.norm()) for name, a, b in zip(names, found, truth, strict=True)
    }


def _own(lengths: list[int], cp: int) -> Any:
    """Index of this context-parallel rank's tokens."""
    if cp == 1:
        return slice(None)
    from megatron.core import mpu

    return own_tokens([0, *itertools.accumulate(lengths)], cp, mpu.get_context_parallel_rank())


def _with_gradients(attend: Any, start: list[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in start]
    with torch.enable_grad():
        output = attend(*inputs).reshape(upstream.shape)
        gradients = torch.autograd.grad(output, inputs, upstream)
    return [output.detach(), *gradients]


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Causal attention, sequence after sequence, [T, heads, width]."""
    outputs = []
    repeat = q.shape[1] // k.shape[1]
    for q_LND, k_LGD, v_LGD in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        k_NLD, v_NLD = (x.transpose(0, 1).repeat_interleave(repeat, 0) for x in (k_LGD, v_LGD))
        scores = q_LND.transpose(0, 1) @ k_NLD.transpose(1, 2) / math.sqrt(q.shape[2])
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        outputs.append((scores.masked_fill(hidden, -math.inf).softmax(-1) @ v_NLD).transpose(0, 1))
    return torch.cat(outputs)
