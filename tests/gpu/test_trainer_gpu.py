"""The trainer on one CUDA device, with the stand-in for Transformer Engine where the real one is not installed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_patches.te_standin.attention import DotProductAttention
from slime_cua.config.trainer import OptimizerConfig, TrainerConfig
from slime_cua.trainer.supervised import SupervisedTrainer
from tests.numerics.hf_reference import reference
from tests.numerics.tiny_models import FULL, IMAGE_TOKEN, VISION_END, VISION_START, make_qwen35
from tests.numerics.trainer_cases import make_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("lengths", [[70, 3, 129], [64, 64]], ids=["ragged", "equal"])
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
        assert (low - full).norm() / full.norm() < 0.02


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisedTrainer]:
    folder = make_qwen35(tmp_path_factory.mktemp("gpu") / "model", FULL)
    config = TrainerConfig(freeze_vision=False, optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0))
    made = SupervisedTrainer(folder, config)
    made.folder = folder  # type: ignore[attr-defined]
    yield made
    made.close()


def test_bf16_logprobs_are_near_transformers_in_float32(trainer: SupervisedTrainer) -> None:
    samples, store = make_samples()
    folder: Path = trainer.folder  # type: ignore[attr-defined]
    wanted = reference(folder, samples, store)
    found = trainer.rank.logprobs(samples, store)
    gaps = [abs(a - b) for x, y in zip(found, wanted["logp"], strict=True) for a, b in zip(x, y, strict=True)]
    assert np.mean(gaps) < 0.03 and max(gaps) < 0.2


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
