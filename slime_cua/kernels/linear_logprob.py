"""Log-prob and entropy of given tokens under a language-model head, without keeping logits.

Legend: R trained rows, H hidden size, V rows of this rank's vocabulary shard.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist

from slime_cua.kernels.torch_logprob import torch_linear_logprob

Memory = Literal["auto", "fast", "lean"]


def linear_logprob(
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_R: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = True,
    entropy_grad: bool = False,
    main_grad: torch.Tensor | None = None,
    memory: Memory = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logp_R, entropy_R) of softmax(hidden_RH @ weight_VH.T / temperature), in nats; fp32 (fp64 for fp64 inputs).

        logp_r    = l[r, target_r] - logsumexp_v l[r, v]
        entropy_r = -sum_v p[r, v] log p[r, v]
        d logp_r / d l[r, v] = [v = target_r] - p[r, v];   d entropy_r / d l[r, v] = -p[r, v] (log p[r, v] + entropy_r)

    hidden_RH: rows that are trained, selected before the head; the same on every rank of `tp_group`. R = 0 is legal.
    weight_VH: this rank's shard: rows rank * V ... (rank + 1) * V of the vocabulary; same dtype as hidden_RH.
    target_R: global token ids, int64. On CPU an id outside the vocabulary raises; on CUDA its log-prob is -inf.
    temperature: logits are divided by it, as the sampler did; must be positive. Autocast changes nothing in here.
    vocab_size: true vocabulary; rows at and beyond it are padding: no probability, no gradient. None: all rows count.
    tp_group: one collective a call, an all-gather of four numbers a row (max, sum of exponentials, target logit, sum for
        the entropy), combined in rank order so that all ranks hold the same bits. Backward: one all-reduce of the
        gradient of hidden_RH, so every rank holds the whole one (as if there were one rank).
    with_entropy: False saves the work; entropy_R is then None.
    entropy_grad: entropy_R takes part in the backward; otherwise it is a constant.
    main_grad: the weight gradient is added here (any float dtype) instead of going to weight_VH.grad. If weight_VH has
        Megatron's `grad_added_to_main_grad`, that is set and a dummy gradient is returned, so that DDP's hooks fire.
    memory: "fast" keeps what spares the backward a product (R * V elements); "lean" at most 800 MiB of it, and takes 1 GiB above
        the gradients for any R at H = 5120, V = 62080; "auto" keeps up to 2 GiB. On CPU all recompute, in larger or smaller
        blocks. docs/kernels.md has times and memory.
    Raises ValueError for wrong shapes, dtypes or values, saying which.
    Source: own; Megatron-core's vocab-parallel cross entropy computes the loss part with three all-reduces.
    """
    _check(hidden_RH, weight_VH, target_R, temperature, main_grad, memory)
    num_rows_total = weight_VH.shape[0] * (dist.get_world_size(tp_group) if tp_group is not None else 1)
    vocab = num_rows_total if vocab_size is None else int(vocab_size)
    if not 0 < vocab <= num_rows_total:
        raise ValueError(
            f"vocab_size {vocab} must be in 1..{num_rows_total}, the rows of the weight over all ranks"
        )
    options: dict[str, Any] = {
        "temperature": float(temperature),
        "vocab_size": vocab,
        "tp_group": tp_group,
        "with_entropy": with_entropy or entropy_grad,
        "entropy_grad": entropy_grad,
        "main_grad": main_grad,
        "memory": memory,
    }
    kernel = _triton_kernel() if hidden_RH.is_cuda and hidden_RH.dtype != torch.float64 else None
    if kernel is not None:
        result: tuple[torch.Tensor, torch.Tensor | None] = kernel.triton_linear_logprob(
            hidden_RH, weight_VH, target_R, **options
        )
        return result
    return torch_linear_logprob(hidden_RH, weight_VH, target_R, **options)


@cache
def _triton_kernel() -> ModuleType | None:
    """The Triton implementation, or None where Triton or the module is not installed."""
    try:
        return importlib.import_module("slime_cua.kernels.triton_logprob")
    except ModuleNotFoundError as error:
        if error.name not in ("triton", "slime_cua.kernels.triton_logprob"):
            raise
        return None


def _check(
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_R: torch.Tensor,
    temperature: float,
    main_grad: torch.Tensor | None,
    memory: str,
) -> None:
    if hidden_RH.dim() != 2 or weight_VH.dim() != 2 or hidden_RH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden_RH {tuple(hidden_RH.shape)} and weight_VH {tuple(weight_VH.shape)} must be [R, H] and [V, H]"
        )
    if target_R.shape != hidden_RH.shape[:1]:
        raise ValueError(
            f"target_R {tuple(target_R.shape)} needs one id for each of the {hidden_RH.shape[0]} rows"
        )
    if target_R.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target_R must be int64 token ids, not {target_R.dtype}")
    if hidden_RH.dtype != weight_VH.dtype or not hidden_RH.dtype.is_floating_point:
        raise ValueError(
            f"hidden_RH ({hidden_RH.dtype}) and weight_VH ({weight_VH.dtype}) must share a float dtype"
        )
    if not 1e-30 <= temperature <= 1e30:
        raise ValueError(
            f"temperature {temperature} must be a positive number whose inverse is one in fp32, too"
        )
    if main_grad is not None and (
        main_grad.shape != weight_VH.shape or not main_grad.dtype.is_floating_point
    ):
        raise ValueError(
            f"main_grad {main_grad.dtype} {tuple(main_grad.shape)} must hold floats and have the weight's shape {tuple(weight_VH.shape)}"
        )
    for name, other in {"weight_VH": weight_VH, "target_R": target_R, "main_grad": main_grad}.items():
        if other is not None and other.device != hidden_RH.device:
            raise ValueError(
                f"{name} is on {other.device}, hidden_RH on {hidden_RH.device}: move one of them"
            )
    if memory not in ("auto", "fast", "lean"):
        raise ValueError(f'memory {memory!r} must be "auto", "fast" or "lean"')
