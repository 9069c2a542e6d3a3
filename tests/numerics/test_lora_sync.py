"""Adapters reach an engine merged, whole and by the names of the full model, and the engine then computes the trainer's log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout.embedded.random_model import RandomModelSpec, write_random_model
from rollout.engines import EngineProcess
from slime_cua.config.rollout import CanaryConfig, EngineConfig
from slime_cua.config.trainer import LoraConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from slime_cua.convert.weight_stream import combined_digest, tensor_digest
from slime_cua.launch.canary import Canary
from slime_cua.trainer.group import LocalTrainerGroup
from slime_cua.trainer.publisher import BroadcastPublisher
from tests.numerics.tiny_models import HYBRID
from tests.numerics.trainer_cases import make_samples

SPEC = RandomModelSpec(
    hidden=64, heads=4, kv_heads=2, head_dim=32, vision_hidden=32, vision_depth=1, layer_types=HYBRID
)
NOISE = 2e-4
"""How far fp32 log-probs of the embedded engine may be from another forward's."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("sync") / "model", SPEC)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EngineProcess]:
    config = EngineConfig(kind="embedded", dtype="fp32", max_context_tokens=4096, start_timeout_s=600)
    with EngineProcess(config, folder, folder.parent / "engine.log") as started:
        yield started


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def found(request: pytest.FixtureRequest, folder: Path, engine: EngineProcess) -> dict[str, Any]:
    """Three steps of adapters, then a publish and the canary."""
    samples = [sample for sample in make_samples()[0] if not sample.segment.images]
    config = TrainerConfig(
        dtype="fp32",
        parallel=ParallelConfig(tp=request.param, sequence_parallel=request.param > 1),
        max_tokens_per_rank=2048,
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0),
        lora=LoraConfig(rank=4, alpha=8),
    )
    publisher = BroadcastPublisher(bucket_bytes=1 << 17, timeout_s=120)
    try:
        with LocalTrainerGroup(config, start_timeout_s=600) as trainer:
            trainer.call("load", folder)
            start = trainer.call("logprobs", samples)
            for _ in range(3):
                trainer.call("train_step", samples, None, "sft")
            before = trainer.call("logprobs", samples)
            sent = trainer.call("named_hf_tensors")
            report = publisher.publish(sent, request.param, [engine.url])
            canary = Canary(CanaryConfig(num_prompts=4), folder, timeout_s=300)
            gaps = canary.check(
                [engine.url], request.param, lambda asked, images: trainer.call("logprobs", asked, images)
            )
            after = trainer.call("logprobs", samples)
    finally:
        publisher.close()
    moved = max(abs(a - b) for x, y in zip(start, before, strict=True) for a, b in zip(x, y, strict=True))
    return {
        "sent": sent,
        "report": report,
        "gaps": gaps,
        "before": before,
        "after": after,
        "moved": moved,
    }


def test_what_is_published_is_the_full_model_by_name_shape_count_and_checksum(
    found: dict[str, Any], folder: Path, engine: EngineProcess
) -> None:
    whole = load_file(folder / "model.safetensors")
    sent, report = found["sent"], found["report"]
    assert {name: tensor.shape for name, tensor in sent} == {name: t.shape for name, t in whole.items()}
    assert len(sent) == len(whole) == report.num_tensors
    assert report.num_bytes == sum(tensor.nbytes for _, tensor in sent)
    assert report.checksum == combined_digest({name: tensor_digest(tensor) for name, tensor in sent})
    assert report.engines == (engine.url,) and report.failures == {}
    changed = {name for name, tensor in sent if not torch.equal(tensor.float(), whole[name].float())}
    assert changed and not any("visual" in name or "norm" in name for name in changed)


def test_the_engine_then_samples_with_the_trainers_logprobs_for_text_and_screens(
    found: dict[str, Any],
) -> None:
    assert found["moved"] > 0.05
    assert {kind: gap.num_tokens > 0 for kind, gap in found["gaps"].items()} == {"text": True, "image": True}
    assert max(gap.max for gap in found["gaps"].values()) < NOISE


def test_the_trainer_is_not_moved_by_what_it_gives_out(found: dict[str, Any]) -> None:
    assert found["after"] == found["before"]
