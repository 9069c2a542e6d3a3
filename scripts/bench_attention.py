"""Which kernels of packed causal attention are right on this machine, and how fast: `python scripts/bench_attention.py`.

One line a kernel: relative distance of output and gradients to float64 for ragged sequences (--check), then milliseconds of
forward and backward for --lengths. Kernels that are not installed or refuse are lines that say so.
`--heads 4 --groups 2 --width 64 --check 70,129 --lengths 256,256 --device cpu --dtype fp32` runs without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, list[int]], torch.Tensor]
"""(q [T, N, D], k [T, G, D], v [T, G, D], lengths) -> [T, N, D]."""


def ends_of(lengths: list[int], device: torch.device) -> torch.Tensor:
    """[B + 1]: where sequences begin, and T."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def each_by(backend: Any) -> Kernel:
    """torch's SDPA of one backend, a sequence after the other."""
    from torch.nn.attention import sdpa_kernel

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        outputs = []
        with sdpa_kernel(backend):
            for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
                heads = [x.transpose(0, 1)[None] for x in parts]
                y = F.scaled_dot_product_attention(
                    *heads, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
                )
                outputs.append(y[0].transpose(0, 1))
        return torch.cat(outputs)

    return kernel


def stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """What this project puts in Transformer Engine's place."""
    from megatron_patches.te_standin.attention import DotProductAttention

    ends = ends_of(lengths, q.device)
    layer = DotProductAttention(q.shape[1], q.shape[2])
    y: torch.Tensor = layer(
        q,
        k,
        v,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    return y.view(q.shape)


def transformer_engine() -> Kernel:
    """Transformer Engine's own choice, with the cuDNN of torch unless CUDNN_HOME names another."""
    from megatron_patches import one_cudnn

    if one_cudnn.is_needed():
        one_cudnn.install()
    from transformer_engine.pytorch import DotProductAttention

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        ends = ends_of(lengths, q.device)
        layer = DotProductAttention(
            q.shape[1],
            q.shape[2],
            num_gqa_groups=k.shape[1],
            qkv_format="thd",
            attn_mask_type="padding_causal",
        )
        y: torch.Tensor = layer(
            q,
            k,
            v,
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        return y.view(q.shape)

    return kernel


def flash_attn_cute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """flash-attn-4."""
    from flash_attn.cute import flash_attn_varlen_func

    ends = ends_of(lengths, q.device)
    y = flash_attn_varlen_func(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True)
    return y[0] if isinstance(y, tuple) else y


def kernels() -> Iterator[tuple[str, Callable[[], Kernel]]]:
    """(name, maker); a maker raises where its kernel is not there."""
    from torch.nn.attention import SDPBackend

    yield "megatron_patches, long sequences one by one", lambda: stand_in
    yield "torch, cuDNN, each sequence", lambda: each_by(SDPBackend.CUDNN_ATTENTION)
    yield "torch, flash, each sequence", lambda: each_by(SDPBackend.FLASH_ATTENTION)
    yield "torch, its own choice, each sequence", lambda: each_by(list(SDPBackend.__members__.values())[1:])
    yield "Transformer Engine, packed", transformer_engine
    yield "flash-attn-4, packed", lambda: flash_attn_cute


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The definition."""
    outputs = []
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        q_NLD, k_GLD, v_GLD = (x.transpose(0, 1) for x in parts)
        repeats = q.shape[1] // k.shape[1]
        scores = q_NLD @ k_GLD.repeat_interleave(repeats, 0).transpose(1, 2) / math.sqrt(q.shape[2])
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        y = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v_GLD.repeat_interleave(repeats, 0)
        outputs.append(y.transpose(0, 1))
    return torch.cat(outputs)


def draw(options: argparse.Namespace, lengths: list[int]) -> list[torch.Tensor]:
    """Queries, keys, values and a gradient of the output."""
    generator = torch.Generator(options.device).manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    total = sum(lengths)
    counts = (options.heads, options.groups, options.groups, options.heads)
    return [
        torch.randn(total, n, options.width, device=options.device, generator=generator).to(dtype)
        for n in counts
    ]


def with_gradients(
    kernel: Kernel, start: list[torch.Tensor], upstream: torch.Tensor, lengths: list[int]
) -> list[torch.Tensor]:
    """Output, dq, dk, dv."""
    inputs = [x.detach().clone().requires_grad_() for x in start]
    output = kernel(*inputs, lengths)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]


def distances(kernel: Kernel, options: argparse.Namespace, lengths: list[int]) -> list[float]:
    """Relative distances of output, dq, dk, dv to float64."""
    *start, upstream = draw(options, lengths)
    truth = with_gradients(plain, [x.double() for x in start], upstream.double(), lengths)
    found = with_gradients(kernel, start, upstream, lengths)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]


def median_ms(kernel: Kernel, options: argparse.Namespace, lengths: list[int]) -> float:
    """Of forward and backward."""
    *start, upstream = draw(options, lengths)
    inputs = [x.requires_grad_() for x in start]
    is_cuda = options.device.type == "cuda"
    times = []
    for _ in range(options.repeats + 3):
        with timed(is_cuda, times):
            output = kernel(*inputs, lengths)
            torch.autograd.grad(output, inputs, upstream)
    return 1e3 * statistics.median(times[3:])


@contextmanager
def timed(is_cuda: bool, times: list[float]) -> Iterator[None]:
    """Seconds of the block."""
    if is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    yield
    if is_cuda:
        torch.cuda.synchronize()
    times.append(time.perf_counter() - began)


def numbers(text: str) -> list[int]:
    """Of `700,1337`."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError("lengths are at least 1")
    return found


def main() -> int:
    """0, also where kernels are wrong: the table says so."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--groups", type=int, default=4, help="key/value heads")
    parser.add_argument("--width", type=int, default=256, help="of a head")
    parser.add_argument("--check", type=numbers, default=[700, 1337], help="lengths that are compared")
    parser.add_argument("--lengths", type=numbers, default=[18000, 14768], help="lengths that are timed")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    options = parser.parse_args()
    if options.heads % options.groups:
        parser.error(f"--groups {options.groups} does not divide --heads {options.heads}")
    lengths = options.lengths
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    # Two products of the forward, five of the backward, over the visible half.
    flops = 3.5 * 4 * pairs * options.heads * options.width
    print(
        f"{options.heads} heads of {options.width} over {options.groups}, {options.dtype}, compared at {options.check}, timed at {lengths}\n"
    )
    print("| kernel | output | dq | dk | dv | ms | TFLOP/s |\n|---|---|---|---|---|---|---|")
    for name, make in kernels():
        try:
            kernel = make()
            apart = " | ".join(f"{x:.4f}" for x in distances(kernel, options, options.check))
        except Exception as error:
            text = (str(error) or "no reason given").splitlines()[0][:120]
            print(f"| {name} | {type(error).__name__}: {text} | | | | | |", flush=True)
            continue
        try:
            spent = median_ms(kernel, options, lengths)
            print(f"| {name} | {apart} | {spent:.1f} | {flops / spent / 1e9:.0f} |", flush=True)
        except Exception as error:
            print(f"| {name} | {apart} | {type(error).__name__} | |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
