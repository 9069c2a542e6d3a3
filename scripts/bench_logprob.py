"""Time and memory of the language-model head: log-prob, entropy and both gradients, beside three bare matrix products.

    python scripts/bench_logprob.py [--shapes 32768x5120x62080,8192x5120x248320] [--out table.md]

Every row is timed in this run. `ratio` is to the three products of the same shape (logits, dH, dW; bf16), timed before and
after the others. `extra GiB` is
the peak above inputs and above the two gradients; `peak GiB` counts the gradients in. With main_grad the weight's gradient
is an input. Peers run when they are installed, unless --no-peers. Then: the fused means of log-ratios, and errors against
float64.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from slime_cua.algo.reduce import build_step_map
from slime_cua.kernels.linear_logprob import linear_logprob
from slime_cua.kernels.segment_ratio import segment_log_ratio, torch_segment_log_ratio

GIB = 1 << 30
SHAPES = "32768x5120x62080,8192x5120x248320,4000x5120x62080,500x5120x62080,4000x5120x248320,500x5120x248320"


def timed_ms(run: Callable[[], object], repeats: int = 7) -> float:
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def peak_bytes(run: Callable[[], object], shape: Shape) -> int:
    """Peak above the inputs, the gradients of hidden and weight included."""
    run()
    shape.hidden.grad = shape.weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Shape:
    """Inputs of one shape, and every way to get log-prob, entropy and gradients from them."""

    def __init__(self, rows: int, hidden: int, vocab: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(0)
        self.rows, self.vocab = rows, vocab
        options = {"device": "cuda", "generator": generator}
        self.hidden = torch.randn(rows, hidden, **options).to(torch.bfloat16).requires_grad_()
        self.weight = (
            (torch.randn(vocab, hidden, **options) / hidden**0.5).to(torch.bfloat16).requires_grad_()
        )
        self.target = torch.randint(0, vocab, (rows,), **options)
        self.upstream = torch.randn(rows, **options) / rows

    def products(self) -> Callable[[], object]:
        hidden, weight = self.hidden.detach(), self.weight.detach()
        logits = torch.empty(self.rows, self.vocab, dtype=torch.bfloat16, device="cuda")
        d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

        def run() -> None:
            torch.mm(hidden, weight.t(), out=logits)
            torch.mm(logits, weight, out=d_hidden)
            torch.mm(logits.t(), hidden, out=d_weight)

        return run

    def ours(self, memory: str, main_grad: torch.Tensor | None = None) -> Callable[[], object]:
        def run() -> None:
            self.hidden.grad = self.weight.grad = None
            logp, _ = linear_logprob(
                self.hidden, self.weight, self.target, memory=memory, main_grad=main_grad
            )  # type: ignore[arg-type]
            (logp * self.upstream).sum().backward()

        return run

    def torch_fp32(self) -> Callable[[], object]:
        def run() -> None:
            self.hidden.grad = self.weight.grad = None
            logits = (self.hidden @ self.weight.t()).float()
            logp = torch.log_softmax(logits, dim=-1).gather(1, self.target[:, None])[:, 0]
            (logp * self.upstream).sum().backward()

        return run

    def liger(self) -> Callable[[], object]:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()

        def run() -> None:
            self.hidden.grad = self.weight.grad = None
            loss(self.weight, self.hidden, self.target).backward()

        return run

    def cut(self) -> Callable[[], object]:
        from cut_cross_entropy import linear_cross_entropy

        def run() -> None:
            self.hidden.grad = self.weight.grad = None
            nll = linear_cross_entropy(
                self.hidden, self.weight, self.target, reduction="none", filter_eps=None
            )
            (nll * self.upstream).sum().backward()

        return run


def errors(shape: Shape) -> list[tuple[str, float, float, float]]:
    """(way, log-prob max abs, dH, dW relative norm) against float64."""
    rows = shape.rows
    hidden, weight = shape.hidden.detach()[:rows], shape.weight.detach()
    target, upstream = shape.target[:rows], shape.upstream[:rows].double()
    logits = torch.cat([hidden.double() @ part.double().t() for part in weight.split(16384)], dim=1)
    log_p = torch.log_softmax(logits, dim=1)
    want = log_p.gather(1, target[:, None])[:, 0]
    grad = -log_p.exp() * upstream[:, None]
    grad.scatter_add_(1, target[:, None], upstream[:, None])
    parts = zip(grad.split(16384, dim=1), weight.split(16384), strict=True)
    d_hidden = sum(g @ w.double() for g, w in parts)
    d_weight = grad.t() @ hidden.double()
    found = []
    small = Shape.__new__(Shape)
    small.rows, small.vocab = rows, shape.vocab
    small.hidden, small.weight = hidden.clone().requires_grad_(), shape.weight
    small.target, small.upstream = target, shape.upstream[:rows]
    ways = {
        "ours fast": small.ours("fast"),
        "ours lean": small.ours("lean"),
        "torch fp32 log-softmax": small.torch_fp32(),
    }
    for name, run in ways.items():
        run()
        assert small.hidden.grad is not None and small.weight.grad is not None
        logp, _ = linear_logprob(small.hidden, small.weight, target, memory="lean")
        if name.startswith("torch"):
            raw = (small.hidden @ small.weight.t()).float()
            logp = torch.log_softmax(raw, dim=-1).gather(1, target[:, None])[:, 0]
        found.append(
            (
                name,
                float((logp.detach().double() - want).abs().max()),
                float((small.hidden.grad.double() - d_hidden).norm() / d_hidden.norm()),
                float((small.weight.grad.double() - d_weight).norm() / d_weight.norm()),
            )
        )
    return found


def segment_ratio_lines(num_tokens: int = 32768, num_steps: int = 600, num_segments: int = 64) -> list[str]:
    """Forward and backward of segment_log_ratio, fused and in plain torch."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    options = {"device": "cuda", "generator": generator}
    step = torch.randint(0, num_steps, (num_tokens,), **options).sort().values
    segment = step * num_segments // num_steps
    steps = build_step_map(
        torch.ones_like(step), segment, step, is_active_S=torch.ones(num_segments, dtype=torch.bool, device="cuda"),
        step_weight=None, num_steps=num_steps, aggregate="step", dtype=torch.float32,
    )  # fmt: skip
    logp = torch.randn(num_tokens, **options).requires_grad_()
    old = torch.randn(num_tokens, **options)
    lines = []
    for name, function in (("fused", segment_log_ratio), ("plain torch", torch_segment_log_ratio)):

        def run(function: Callable[..., tuple[torch.Tensor, torch.Tensor]] = function) -> None:
            logp.grad = None
            function(logp, old, steps)[0].sum().backward()

        lines.append(f"| {name} | {timed_ms(run, repeats=21):.3f} |")
    return lines


def measure(rows: int, hidden: int, vocab: int, with_peers: bool) -> list[str]:
    shape = Shape(rows, hidden, vocab)
    gradients = shape.hidden.nbytes + shape.weight.nbytes
    before = timed_ms(shape.products())
    torch.cuda.empty_cache()
    timings: list[tuple[str, float, float, int]] = []
    failed: list[str] = []
    ways: dict[str, Callable[[], object]] = {"ours fast": shape.ours("fast"), "ours lean": shape.ours("lean")}
    main_grad = torch.zeros(vocab, hidden, dtype=torch.float32, device="cuda")
    ways["ours fast, fp32 main_grad"] = shape.ours("fast", main_grad)
    ways["ours lean, fp32 main_grad"] = shape.ours("lean", main_grad)
    ways["torch fp32 log-softmax"] = shape.torch_fp32()
    if with_peers and importlib.util.find_spec("liger_kernel"):
        ways["liger fused CE (no ratio loss)"] = shape.liger()
    if with_peers and importlib.util.find_spec("cut_cross_entropy"):
        ways["cut-cross-entropy"] = shape.cut()
    for name, run in ways.items():
        try:
            peak = peak_bytes(run, shape)
            counted = gradients if "main_grad" not in name else shape.hidden.nbytes
            timings.append((name, timed_ms(run), (peak - counted) / GIB, peak))
        except Exception as error:
            failed.append(f"| {name} | failed: {type(error).__name__}: {str(error)[:80]} | | | |")
        finally:
            torch.cuda.empty_cache()
    after = timed_ms(shape.products())
    base = (before + after) / 2
    lines = [f"| three products (before, after) | {before:.2f}, {after:.2f} | 1.00 | - | - |"]
    for name, time_ms, extra, peak in timings:
        lines.append(f"| {name} | {time_ms:.2f} | {time_ms / base:.2f} | {extra:.2f} | {peak / GIB:.2f} |")
    return lines + failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_logprob needs a CUDA device")
    text = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, medians of 7", ""]
    for name in arguments.shapes.split(","):
        rows, hidden, vocab = map(int, name.split("x"))
        done = len(text)
        text += [
            f"R={rows} H={hidden} V={vocab}",
            "",
            "| way | ms | ratio | extra GiB | peak GiB |",
            "|---|---|---|---|---|",
        ]
        text += [*measure(rows, hidden, vocab, not arguments.no_peers), ""]
        print("\n".join(text[done:]), flush=True)
        torch.cuda.empty_cache()
    done = len(text)
    text += [
        "Means of log-ratios, forward and backward (32768 tokens, 600 steps, 64 segments)",
        "",
        "| way | ms |",
        "|---|---|",
        *segment_ratio_lines(),
        "",
        "Errors against float64 (R=1024 H=5120 V=62080)",
        "",
        "| way | log-prob, max abs | dH, relative | dW, relative |",
        "|---|---|---|---|",
    ]
    text += [f"| {n} | {a:.1e} | {b:.1e} | {c:.1e} |" for n, a, b, c in errors(Shape(1024, 5120, 62080))]
    print("\n".join(text[done:]))
    if arguments.out:
        arguments.out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
