"""The trainer on CUDA devices, with the stand-in for Transformer Engine where the real one is not installed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_patches import fla_standin
from megatron_patches.te_standin.attention import DotProductAttention
from slime_cua.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slime_cua.trainer.group import LocalTrainerGroup
from slime_cua.trainer.supervised import SupervisedTrainer
from tests.numerics.tiny_models import FULL, HYBRID, IMAGE_TOKEN, VISION_END, VISION_START, make_qwen35
from tests.numerics.trainer_cases import make_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # packages of GPU sets warn at import
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).resolve().parents[2]
REFERENCE = """
import sys
sys.modules["fla"] = None  # transformers would run its CUDA kernels on CPU tensors
import torch
from pathlib import Path
from tests.numerics.hf_reference import reference
from tests.numerics.trainer_cases import make_samples
torch.save(reference(Path(sys.argv[1]), *make_samples()), sys.argv[2])
"""


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("lengths", [[70, 3, 129], [64, 64], [2500, 2049]], ids=["ragged", "equal", "long"])
def test_packed_flash_attention_and_its_gradient_equal_float32(lengths: list[int]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn(total, n, 64, device="cuda", generator=generator) for n in (4, 2, 2))
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    options = {
        "cu_seqlens_q": cu,
        "cu_seqlens_kv": cu,
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
    }
    options |= {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    layer = DotProductAttention(4, 64)
    outputs, grads = [], []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
        y = layer(*inputs, **options)
        y.float().square().sum().backward()
        outputs.append(y.float())
        grads.append([x.grad.float() for x in inputs if x.grad is not None])
    torch.testing.assert_close(outputs[1], outputs[0], atol=0.03, rtol=0.03)
    for low, full in zip(grads[1], grads[0], strict=True):
        assert relative(low, full) < 0.02


@pytest.mark.skipif(fla_standin.is_missing(), reason="needs flash-linear-attention")
@pytest.mark.parametrize("width", [64, 128])
def test_the_gated_delta_rule_and_its_gradients_equal_plain_torch(width: int) -> None:
    """Packed sequences, one of them shorter than a chunk; the state starts anew in each."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    generator = torch.Generator("cuda").manual_seed(0)
    lengths, heads = [130, 5, 257], 4
    total = sum(lengths)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v, upstream = (
        torch.randn(1, total, heads, width, device="cuda", generator=generator) for _ in range(4)
    )
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    decay = -torch.rand(1, total, heads, device="cuda", generator=generator)
    beta = torch.rand(1, total, heads, device="cuda", generator=generator)
    results = []
    for function, dtype in (
        (fla_standin.chunk_gated_delta_rule, torch.float32),
        (chunk_gated_delta_rule, torch.bfloat16),
    ):
        rounded = [x.bfloat16().to(dtype) for x in (q, k, v)]
        inputs = [x.detach().requires_grad_() for x in (*rounded, decay, beta.bfloat16().to(dtype))]
        y = function(*inputs[:3], g=inputs[3], beta=inputs[4], cu_seqlens=cu)[0]
        (y.float() * upstream).sum().backward()
        results.append([y, *(x.grad for x in inputs)])
    for name, found, wanted in zip(("y", "dq", "dk", "dv", "dg", "dbeta"), *results[::-1], strict=True):
        assert relative(found, wanted) < 0.02, name


@pytest.fixture(scope="module", params=[FULL, HYBRID], ids=["attention", "gated delta net"])
def trainer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SupervisedTrainer]:
    folder = tmp_path_factory.mktemp("gpu") / "model"
    make_qwen35(folder, request.param, linear_head_dim=64)
    config = TrainerConfig(freeze_vision=False, optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0))
    made = SupervisedTrainer(folder, config)
    made.folder = folder  # type: ignore[attr-defined]
    yield made
    made.close()


def reference_of(folder: Path) -> dict[str, Any]:
    """transformers in float32 on the CPU, in a process that has no flash-linear-attention."""
    out = folder.parent / "reference.pt"
    command = [sys.executable, "-W", "ignore", "-c", REFERENCE, str(folder), str(out)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=240)
    result: dict[str, Any] = torch.load(out)
    return result


def gaps(found: list[list[float]], wanted: list[list[float]]) -> list[float]:
    return [abs(a - b) for x, y in zip(found, wanted, strict=True) for a, b in zip(x, y, strict=True)]


def test_bf16_logprobs_are_near_transformers_in_float32(trainer: SupervisedTrainer) -> None:
    samples, store = make_samples()
    wanted = reference_of(trainer.folder)["logp"]  # type: ignore[attr-defined]
    apart = gaps(trainer.rank.logprobs(samples, store), wanted)
    assert np.mean(apart) < 0.03 and max(apart) < 0.2


def test_a_ragged_gspo_step_and_supervised_steps_run_and_learn(trainer: SupervisedTrainer) -> None:
    samples, store = make_samples()
    metrics = trainer.rank.train_step(samples, store, "gspo", temperature=0.5)
    assert np.isfinite(metrics["loss/grad_norm"]) and metrics["loss/is_skipped"] == 0
    rng = np.random.default_rng(0)
    batch = [
        (
            [10, VISION_START, IMAGE_TOKEN, VISION_END, *rng.integers(20, 300, n).tolist()],
            [False] * 4 + [True] * n,
            [rng.integers(0, 255, (64, 96, 3), dtype=np.uint8)],
        )
        for n in rng.integers(8, 30, 64).tolist()
    ]
    started = time.monotonic()
    losses = list(trainer.run(batch for _ in range(40)))
    print(f"{40 * 64 / (time.monotonic() - started):.0f} samples/s, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0] - 1


def test_a_saved_state_comes_back_on_the_device(trainer: SupervisedTrainer, tmp_path: Path) -> None:
    samples, store = make_samples()
    trainer.rank.save(tmp_path, 1, is_async=True)
    before = trainer.rank.logprobs(samples, store)
    after_one = trainer.rank.train_step(samples, store, "sft")["sft/loss"]
    trainer.rank.finish_save()
    trainer.rank.restore(tmp_path)
    assert trainer.rank.logprobs(samples, store) == before
    assert trainer.rank.train_step(samples, store, "sft")["sft/loss"] == pytest.approx(after_one, abs=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_train_as_one_does(tmp_path: Path) -> None:
    """Log-probs and three steps of TP=2 with sequence parallel against TP=1, all bf16."""
    folder = make_qwen35(tmp_path / "model", HYBRID, linear_head_dim=64)
    samples, store = make_samples(with_ten_images=True)
    found: list[tuple[Any, list[dict[str, float]]]] = []
    for parallel in (ParallelConfig(), ParallelConfig(tp=2, sequence_parallel=True)):
        config = TrainerConfig(parallel=parallel, freeze_vision=False, optimizer=OptimizerConfig(lr=1e-3))
        with LocalTrainerGroup(config) as group:
            group.call("load", folder)
            logp = group.call("logprobs", samples, store)
            found.append((logp, [group.call("train_step", samples, store, "sft") for _ in range(3)]))
    (one, one_steps), (two, two_steps) = found
    assert np.mean(gaps(two, one)) < 0.03
    for single, double in zip(one_steps, two_steps, strict=True):
        assert double["sft/loss"] == pytest.approx(single["sft/loss"], rel=0.01)
        assert double["sft/grad_norm"] == pytest.approx(single["sft/grad_norm"], rel=0.05)
