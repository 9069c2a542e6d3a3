"""Run by test_triton_logprob in a process of its own: the Triton kernels against float64, on CPU (interpreted) or CUDA.

python tests/numerics/triton_cases.py [rank world port]
"""

import os
import sys

import torch
import torch.distributed as dist

from slime_cua.kernels import triton_logprob
from slime_cua.kernels.triton_logprob import triton_linear_logprob

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
    world = dist.get_world_size() if group else 1
    for memory in ("fast", "lean"):
        check(13, 8, 37 * world - 5, 37, 0.7, memory, torch.float32, False, False, group)
        check(13, 8, 37 * world - 5, 37, 0.7, memory, torch.float32, False, True, group)
        check(1, 16, 20, 20, 1.0, memory, torch.float32, False, False, group)
        check(9, 8, 37 * world, 37, 1.3, memory, torch.float32, True, False, group)
        check(24, 32, 64 * world, 64, 1.0, memory, torch.bfloat16, False, False, group)
    triton_logprob.LEAN_KEEP_BYTES = 128 * 64 * 4  # 128 rows are kept, the others recomputed in small blocks
    triton_logprob.LEAN_ROWS, triton_logprob.LEAN_GRAD_BYTES, triton_logprob.LEAN_LOGITS_BYTES = 40, 1, 1
    check(200, 8, 600 * world, 600, 0.9, "lean", torch.float32, False, False, group)
    triton_logprob.LEAN_KEEP_BYTES = 128 * 600 * 4
    check(200, 8, 600 * world, 600, 0.9, "lean", torch.float32, False, False, group)
    check(200, 8, 600 * world, 600, 0.9, "lean", torch.float32, False, True, group)
    check(0, 8, 20 * world, 20, 1.0, "lean", torch.float32, False, False, group)
    check(5, 8, 10, 40, 1.0, "fast", torch.float32, False, False, group)  # a whole shard of padding under TP
    if group is None:
        check_extremes()
    else:
        dist.destroy_process_group()
    print("ok")


if __name__ == "__main__":
    main()
