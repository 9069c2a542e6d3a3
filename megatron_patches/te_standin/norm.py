"""RMSNorm and LayerNorm in fp32, with Transformer Engine's names."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Parameter


def normalize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, is_zero_centered: bool
) -> torch.Tensor:
    """RMSNorm of the last axis without `bias`, LayerNorm with it; computed in fp32, returned in x's dtype.

    is_zero_centered: the gain is 1 + weight.
    """
    gain = weight.float() + 1.0 if is_zero_centered else weight.float()
    if bias is None:
        y = F.rms_norm(x.float(), (x.shape[-1],), gain, eps)
    else:
        y = F.layer_norm(x.float(), (x.shape[-1],), gain, bias.float(), eps)
    return y.to(x.dtype)


def make_norm_parameters(
    width: int, kind: str, is_zero_centered: bool, is_sequence_parallel: bool, factory: dict[str, Any]
) -> tuple[Parameter, Parameter | None]:
    """Gain and (LayerNorm only) bias, flagged so that Megatron sums their gradients under sequence parallel."""
    if kind not in ("RMSNorm", "LayerNorm"):
        raise ValueError(f"normalization {kind!r} must be 'RMSNorm' or 'LayerNorm'")
    gain = Parameter(torch.full((width,), 0.0 if is_zero_centered else 1.0, **factory))
    bias = Parameter(torch.zeros(width, **factory)) if kind == "LayerNorm" else None
    for parameter in (gain, bias):
        if parameter is not None:
            parameter.sequence_parallel = is_sequence_parallel  # type: ignore[attr-defined]
    return gain, bias


class _Norm(torch.nn.Module):
    kind = ""

    def __init__(self, hidden_size: int | None = None, eps: float = 1e-5, **options: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = options.get("zero_centered_gamma", False)
        self.sequence_parallel = bool(options.get("sequence_parallel"))
        default_device = "cuda" if torch.cuda.is_available() else "cpu"
        factory = {"dtype": options.get("params_dtype"), "device": options.get("device", default_device)}
        width = hidden_size if hidden_size is not None else options["normalized_shape"]
        self.weight, self.bias = make_norm_parameters(
            width, self.kind, self.zero_centered_gamma, self.sequence_parallel, factory
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * gain."""

    kind = "RMSNorm"


class LayerNorm(_Norm):
    """(x - mean) / sqrt(var + eps) * gain + bias."""

    kind = "LayerNorm"
