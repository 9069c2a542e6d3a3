"""Run by test_triton_logprob in a process of its own: the Triton kernels against float64, on CPU (interpreted) or CUDA.

python tests/numerics/triton_cases.py [rank world port]
"""

import itertools
import math
import os
import sys

import torch
import torch.distributed as dist

from slime_cua.algo.reduce import build_step_map
from slime_cua.kernels import triton_logprob, triton_rows
from slime_cua.kernels.triton_logprob import triton_linear_logprob
from slime_cua.kernels.triton_segments import triton_segment_log_ratio
from tests.numerics.gspo_reference import random_batch, sample_mean, steps_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def reference(hidden, weight, target, temperature, vocab, grad_logp, grad_entropy):
    """(logp, entropy, dH, dW) in float64 by autograd over plain log_softmax."""
    h = hidden.double().requires_grad_()
    w = weight.double().requires_grad_()
    log_p = torch.log_softmax((h @ w[:vocab].t()) / temperature, dim=1)
    logp = log_p.gather(1, target[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(dim=1)
    loss = (logp * grad_logp).sum()
    if grad_entropy is not None:
        loss = loss + (entropy * grad_entropy).sum()
    loss.backward()
    return logp.detach(), entropy.detach(), h.grad, w.grad


def check(
    rows, hidden_size, vocab, padded, temperature, memory, dtype, entropy_grad, with_main_grad, group=None
):
    rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    generator = torch.Generator().manual_seed(rows * 7 + vocab)
    hidden = torch.randn(rows, hidden_size, generator=generator).to(dtype)
    weight = torch.randn(padded * world, hidden_size, generator=generator).to(dtype)
    target = torch.randint(0, vocab, (rows,), generator=generator)
    grad_logp = torch.randn(rows, generator=generator)
    grad_entropy = torch.randn(rows, generator=generator) if entropy_grad else None
    want = reference(hidden, weight, target, temperature, vocab, grad_logp.double(), grad_entropy)
    h = hidden.to(DEVICE).requires_grad_()
    w = weight[rank * padded : (rank + 1) * padded].to(DEVICE).requires_grad_()
    main_grad = torch.ones(w.shape, dtype=torch.float32, device=DEVICE) if with_main_grad else None
    logp, entropy = triton_linear_logprob(
        h, w, target.to(DEVICE), temperature=temperature, vocab_size=vocab, tp_group=group,
        with_entropy=True, entropy_grad=entropy_grad, main_grad=main_grad, memory=memory,
    )  # fmt: skip
    loss = (logp * grad_logp.to(DEVICE)).sum()
    if grad_entropy is not None:
        loss = loss + (entropy * grad_entropy.to(DEVICE)).sum()
    loss.backward()
    got_weight = (main_grad - 1 if with_main_grad else w.grad).double().cpu()
    got = (logp.detach().double().cpu(), entropy.detach().double().cpu(), h.grad.double().cpu(), got_weight)
    want = (*want[:3], want[3][rank * padded : (rank + 1) * padded])
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    for name, a, b in zip(("logp", "entropy", "dH", "dW"), got, want, strict=True):
        bound = 2e-3 if name in ("logp", "entropy") and dtype != torch.float32 else tolerance
        error = (
            0.0
            if not a.numel()
            else (
                (a - b).abs().max()
                if name in ("logp", "entropy")
                else (a - b).norm() / b.norm().clamp(min=1e-30)
            ).item()
        )
        scale = (
            b.abs().max().item()
            if a.numel() and name in ("logp", "entropy") and dtype == torch.float32
            else 1.0
        )
        assert error <= bound * max(1.0, scale), f"{name} misses by {error} ({memory}, {dtype}, rows {rows})"
    assert not got_weight[max(0, vocab - rank * padded) :].any(), "padding rows have a gradient"


def check_extremes():
    """A target 200 nats below the top, and a certain one: finite, and right."""
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=DEVICE, requires_grad=True)
    weight = torch.tensor([[200.0, 0.0], [0.0, 200.0], [0.0, 0.0]], device=DEVICE, requires_grad=True)
    target = torch.tensor([1, 1], device=DEVICE)
    for memory in ("fast", "lean"):
        hidden.grad = weight.grad = None
        logp, _ = triton_linear_logprob(
            hidden, weight, target, temperature=1.0, vocab_size=3, tp_group=None, with_entropy=True,
            entropy_grad=False, main_grad=None, memory=memory,
        )  # fmt: skip
        logp.sum().backward()
        assert torch.allclose(logp.detach().cpu(), torch.tensor([-200.0, 0.0]))
        assert torch.allclose(hidden.grad.cpu(), torch.tensor([[-200.0, 200.0], [0.0, 0.0]]), atol=1e-3)
        assert torch.isfinite(weight.grad).all()


def check_strided_targets():
    """Targets that are every other entry of a tensor give what their copy gives."""
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, 8, generator=generator).to(DEVICE) for n in (7, 20))
    target = torch.randint(0, 20, (14,), generator=generator).to(DEVICE)[::2]
    for memory, keep_bytes in itertools.product(("fast", "lean"), (1 << 30, 0)):
        triton_logprob.LEAN_KEEP_BYTES = keep_bytes
        found = []
        for ids in (target, target.clone()):
            h = hidden.clone().requires_grad_()
            logp, _ = triton_linear_logprob(
                h, weight, ids, temperature=1.0, vocab_size=20, tp_group=None, with_entropy=True,
                entropy_grad=False, main_grad=None, memory=memory,
            )  # fmt: skip
            logp.sum().backward()
            found.append((logp.detach(), h.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "strided targets are read wrongly"


def check_reference_gap():
    """Rows whose maximum lies far above the first columns and the target are written again: same values, no overflow."""
    generator = torch.Generator().manual_seed(3)
    block, triton_rows._BLOCK = triton_rows._BLOCK, 16
    logits = torch.randn(4, 40, generator=generator)
    logits[0, 33], logits[1, 20], logits[2, 39] = 19.0, 70.0, 300.0
    target = torch.tensor([2, 20, 5, 7])
    options = {"first_id": 0, "num_real": 40, "inverse_temperature": 1.0}
    log_p = torch.log_softmax(logits.double(), dim=1)
    is_target = torch.nn.functional.one_hot(target, 40).bool()
    want = is_target.double() - log_p.exp()
    for dtype, is_whole in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        kept, stats = torch.empty(4, 40, dtype=dtype, device=DEVICE), torch.empty(4, 4, device=DEVICE)
        results = torch.empty(4, 4, device=DEVICE)
        triton_rows.write_exponentials(
            logits.to(DEVICE), kept, target.to(DEVICE), results_4R=results, first_row=0,
            stats_R4=None if is_whole else stats, **options,
        )  # fmt: skip
        if not is_whole:
            assert stats[0, 0] < 19.0 and stats[1:3, 0].tolist() == [70.0, 300.0]
            triton_rows.finish_rows(stats[None], target.to(DEVICE), kept, results, rank=0, **options)
        logp, _, entropy, factor = results.double().cpu()
        gradient = kept.double().cpu() * factor[:, None]
        bound = 1e-4 if dtype == torch.float32 else 1.6e-2  # the interpreter cuts bf16 instead of rounding
        assert ((gradient - want).abs() <= bound * want.abs() + 2e-6).all()
        assert ((gradient - want)[is_target].abs() <= 1e-4 * want[is_target].abs() + 2e-6).all()
        assert torch.allclose(logp, log_p.gather(1, target[:, None])[:, 0], rtol=1e-6)
        assert torch.allclose(entropy, -(log_p.exp() * log_p).sum(1), rtol=1e-5, atol=1e-5)
    triton_rows._BLOCK = block


def check_segments(dtype, group=None):
    """Fused means of log-ratios against loops: tokens in any order, garbage where masked, a step on two ranks."""
    batch = random_batch(seed=31, num_segments=12)
    steps_of_segment = steps_of(batch)
    rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    mine = torch.arange(rank, len(batch.tokens), world)
    logp, old = (batch.tensor(name)[mine].to(DEVICE, dtype) for name in ("logp", "old_logp"))
    steps = build_step_map(
        batch.tensor("is_trained")[mine].to(DEVICE), batch.tensor("segment")[mine].to(DEVICE),
        batch.tensor("step")[mine].to(DEVICE), is_active_S=torch.ones(12, dtype=torch.bool, device=DEVICE),
        step_weight=batch.vector("step_weight").to(DEVICE, dtype), num_steps=len(batch.step_weight), aggregate="step",
        dtype=dtype, cp_group=group,
    )  # fmt: skip
    logp.requires_grad_()
    log_w, mean = triton_segment_log_ratio(logp, old, steps)
    scale = torch.linspace(-1, 1, 12, dtype=torch.float64)
    (log_w * scale.to(DEVICE, dtype)).sum().backward()
    bound = 1e-13 if dtype == torch.float64 else 3e-7
    for segment, of_steps in steps_of_segment.items():
        want = sample_mean(batch, of_steps, lambda token: token.logp - token.old_logp, "step")
        assert abs(log_w[segment].item() - want) < bound
        total = sum(batch.step_weight[step] for step in of_steps)
        for step, tokens in of_steps.items():
            deltas = [token.logp - token.old_logp for token in tokens]
            k3 = [math.exp(delta) - 1 - delta for delta in deltas]
            want = torch.tensor([sum(deltas), sum(k3)], dtype=torch.float64) / len(tokens)
            assert (mean[step].double().cpu() - want).abs().max() < bound
            share = scale[segment].item() * batch.step_weight[step] / total / len(tokens)
            for place, index in enumerate(mine.tolist()):
                if batch.tokens[index].is_trained and batch.tokens[index].step == step:
                    assert abs(logp.grad[place].item() - share) < bound
    is_trained = batch.tensor("is_trained")[mine]
    assert (logp.grad.cpu()[~is_trained] == 0).all()
    again = triton_segment_log_ratio(logp, old, steps)[0]
    assert torch.equal(again, log_w), "two runs differ"


def check_blocks(world, group):
    """Rows partly kept, the others recomputed in several blocks of rows and columns."""
    triton_logprob.LEAN_ROWS, triton_logprob.LEAN_GRAD_BYTES, triton_logprob.LEAN_LOGITS_BYTES = 5, 1, 1
    triton_logprob.LEAN_KEEP_BYTES = 128 * 300 * 4
    triton_logprob.EARLY_ELEMENTS = 0
    check(136, 8, 300 * world, 300, 0.9, "lean", torch.float32, False, False, group)
    triton_logprob.LEAN_KEEP_BYTES = 0
    check(8, 8, 600 * world, 600, 0.9, "lean", torch.float32, False, True, group)
    check(8, 8, 600 * world, 600, 0.9, "lean", torch.float32, True, False, group)


def main() -> None:
    group = None
    if len(sys.argv) == 4:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
        if DEVICE == "cuda":
            torch.cuda.set_device(int(sys.argv[1]))
        dist.init_process_group(
            "nccl" if DEVICE == "cuda" else "gloo", rank=int(sys.argv[1]), world_size=int(sys.argv[2])
        )
        group = dist.group.WORLD
    world = dist.get_world_size(group) if group else 1
    for keep_bytes in (1 << 30, 0):  # all rows kept; all recomputed
        triton_logprob.LEAN_KEEP_BYTES = keep_bytes
        check(13, 8, 37 * world - 5, 37, 0.7, "lean", torch.float32, False, False, group)
        check(9, 8, 37 * world - 5, 37, 0.7, "lean", torch.float32, False, True, group)
        check(24, 32, 64 * world, 64, 1.0, "lean", torch.bfloat16, False, False, group)
    check(13, 8, 37 * world - 5, 37, 0.7, "fast", torch.float32, False, False, group)
    check(9, 8, 37 * world, 37, 1.3, "fast", torch.float32, True, False, group)
    check(1, 16, 20, 20, 1.0, "auto", torch.float32, False, False, group)
    check(0, 8, 20 * world, 20, 1.0, "lean", torch.float32, False, False, group)
    check(5, 8, 10, 40, 1.0, "fast", torch.float32, False, False, group)  # a whole shard of padding under TP
    check_blocks(world, group)
    for dtype in (torch.float32, torch.float64):
        check_segments(dtype, group)
    if group is None:
        check_extremes()
        check_strided_targets()
        check_reference_gap()
    else:
        dist.destroy_process_group()
    print("ok")


if __name__ == "__main__":
    main()
