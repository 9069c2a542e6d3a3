"""Symptom: building a gated-delta-net layer raises 'FLA is not installed'.
Upstream: megatron-core 0.16.1 core/ssm/gated_delta_net.py, mcore_bridge 1.6.5 model/modules/gated_delta_net.py.
Why:      flash-linear-attention is Triton code for GPUs. Three functions are used; here they are plain torch, with the
          state reset at the boundaries of packed sequences.
Remove when: flash-linear-attention runs on CPU.
Returns early when the real package is installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from typing import Any

import torch
import torch.nn.functional as F

from megatron_patches.registry import Patch
from megatron_patches.standin_modules import add_module


def l2norm(x: torch.Tensor, eps: float = 1e-6, **ignored: Any) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis, in fp32."""
    y = x.float()
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Depthwise convolution over past tokens of the same sequence. x [batch, tokens, channels], weight [channels, width]."""
    outputs = []
    for start, end in _spans(cu_seqlens, x.shape[1]):
        padded = F.pad(x[:, start:end].transpose(1, 2), (weight.shape[-1] - 1, 0))
        outputs.append(F.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0]).transpose(1, 2))
    y = torch.cat(outputs, dim=1)
    return (F.silu(y) if activation in ("silu", "swish") else y), None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule by megatron's torch code, a packed sequence at a time. All [batch, tokens, heads, ...]."""
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if cu_seqlens is None:
        return torch_chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state
        )
    outputs = []
    for start, end in _spans(cu_seqlens, q.shape[1]):
        part = (x[:, start:end] for x in (q, k, v, g, beta))
        q_part, k_part, v_part, g_part, beta_part = part
        outputs.append(torch_chunk_gated_delta_rule(q_part, k_part, v_part, g=g_part, beta=beta_part)[0])
    return torch.cat(outputs, dim=1), None


def _spans(cu_seqlens: torch.Tensor | None, num_tokens: int) -> list[tuple[int, int]]:
    bounds = [0, num_tokens] if cu_seqlens is None else cu_seqlens.tolist()
    return [(start, end) for start, end in itertools.pairwise(bounds) if end > start]


def is_missing() -> bool:
    """True where flash-linear-attention is not installed."""
    return "fla" not in sys.modules and importlib.util.find_spec("fla") is None


def install() -> None:
    """Register the three functions under the names that megatron-core and mcore-bridge import."""
    for name in ("fla", "fla.modules", "fla.ops", "fla.modules.conv"):
        add_module(name)
    add_module("fla.modules.l2norm", l2norm=l2norm)
    add_module("fla.modules.convolution", causal_conv1d=causal_conv1d)
    add_module("fla.modules.conv.causal_conv1d", causal_conv1d=causal_conv1d)
    add_module("fla.ops.gated_delta_rule", chunk_gated_delta_rule=chunk_gated_delta_rule)


PATCH = Patch(
    name="fla_standin",
    phase="before_import",
    symptom="flash-linear-attention is not installed; gated delta net runs in plain torch",
    install=install,
    is_needed=is_missing,
)
