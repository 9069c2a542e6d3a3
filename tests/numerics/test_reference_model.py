"""Another checkpoint as the frozen reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slime_cua.config.trainer import LoraConfig, TrainerConfig
from slime_cua.core.errors import ConfigError
from slime_cua.trainer.extra_forwards import REFERENCE
from slime_cua.trainer.rank import TrainerRank
from tests.numerics.hf_reference import reference
from tests.numerics.tiny_models import FULL, make_qwen35
from tests.numerics.trainer_cases import make_samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def moved(folder: Path) -> Path:
    """Every weight a little away from what make_qwen35 wrote."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file(
        {k: v * 1.05 for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    return folder


def test_reference_logprobs_are_those_of_the_folder_and_the_policys_weights_come_back(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    policy, other = make_qwen35(tmp_path / "policy", FULL), moved(make_qwen35(tmp_path / "other", FULL))
    samples, store = make_samples()
    trainer = TrainerRank(TrainerConfig(dtype="fp32", max_tokens_per_rank=512, reference_model=str(other)))
    request.addfinalizer(trainer.close)
    trainer.load(policy)
    before = trainer.logprobs(samples, store)
    batch = trainer._pack(samples)
    with torch.no_grad():
        (extra,) = trainer.extra.run([REFERENCE], lambda: trainer._microbatches(batch, store), 1.0)
    ((packed,),) = batch.micro_batches
    wanted = dict(
        zip([s.segment.segment_id for s in samples], reference(other, samples, store)["logp"], strict=True)
    )
    in_order = [value for name in packed.segment_names for value in wanted[name]]
    assert extra.ref_R is not None
    torch.testing.assert_close(extra.ref_R, torch.tensor(in_order), atol=1e-4, rtol=0)
    assert (
        max(
            abs(a - b)
            for x, y in zip(before, wanted.values(), strict=True)
            for a, b in zip(x, y, strict=True)
        )
        > 0.01
    )
    assert trainer.logprobs(samples, store) == before


def test_a_reference_folder_beside_adapters_is_refused(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    policy = make_qwen35(tmp_path / "policy", FULL)
    trainer = TrainerRank(TrainerConfig(dtype="fp32", reference_model=str(policy), lora=LoraConfig(rank=4)))
    request.addfinalizer(trainer.close)
    with pytest.raises(ConfigError, match=r"reference_model must be empty with trainer\.lora"):
        trainer.load(policy)


def test_a_reference_of_other_sizes_is_refused_by_name(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    policy, other = (
        make_qwen35(tmp_path / "policy", FULL),
        make_qwen35(tmp_path / "other", FULL, vocab_size=512),
    )
    trainer = TrainerRank(TrainerConfig(dtype="fp32", reference_model=str(other)))
    request.addfinalizer(trainer.close)
    with pytest.raises(ConfigError, match=r"reference_model = .*other: tensor .* has shape \(512, 64\)"):
        trainer.load(policy)


def test_a_family_that_is_not_trained_is_told_with_those_that_are_before_its_weights_are_looked_at(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen9"}))
    trainer = TrainerRank(TrainerConfig(dtype="fp32"))
    request.addfinalizer(trainer.close)
    with pytest.raises(ConfigError, match=r"model_type 'qwen9' has no trainer here; .*qwen3_5_moe"):
        trainer.load(tmp_path)
