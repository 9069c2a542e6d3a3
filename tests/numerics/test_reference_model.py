"""Another checkpoint as the frozen reference, beside training of all weights and of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime_cua.config.algo import LossConfig
from slime_cua.config.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from slime_cua.core.errors import ConfigError
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


@pytest.mark.parametrize("rank", [0, 4])
def test_the_kl_is_to_the_reference_folder_and_the_policys_weights_come_back(
    rank: int, tmp_path: Path
) -> None:
    """k1 with coefficient 1 and advantage 0: the loss is the mean over samples of the mean log-ratio to the reference."""
    policy, other = make_qwen35(tmp_path / "policy", FULL), moved(make_qwen35(tmp_path / "other", FULL))
    samples, store = make_samples()
    samples = [sample.model_copy(update={"advantage": 0.0}) for sample in samples]
    config = TrainerConfig(
        dtype="fp32",
        max_tokens_per_rank=512,
        optimizer=OptimizerConfig(lr=1e-12, weight_decay=0.0),
        reference_model=str(other),
        lora=LoraConfig(rank=rank),
    )
    trainer = TrainerRank(config)
    trainer.load(policy)
    before = trainer.logprobs(samples, store)
    section = LossConfig(kl="k1", kl_coef=1.0, pi_old="proximal", step_weights={"gui": 1.0, "code": 1.0})
    loss = trainer.train_step(samples, store, "gspo", section)["loss/policy"]
    after = trainer.logprobs(samples, store)
    trainer.close()
    wanted = reference(other, samples, store)["logp"]
    assert loss == pytest.approx(mean_of_step_means(samples, before, wanted), abs=1e-4)
    assert abs(loss) > 1e-3
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-5, rtol=0)


def mean_of_step_means(samples, logp, ref) -> float:
    """Step-balanced: per sample the mean over its steps of the mean over a step's tokens of logp - ref."""
    total = 0.0
    for sample, mine, theirs in zip(samples, logp, ref, strict=True):
        steps = [step for step in sample.segment.step_of_token if step >= 0]
        means = []
        for step in sorted(set(steps)):
            ratios = [a - b for a, b, s in zip(mine, theirs, steps, strict=True) if s == step]
            means.append(sum(ratios) / len(ratios))
        total += sum(means) / len(means)
    return total / len(samples)


def test_a_reference_of_other_sizes_is_refused_by_name(tmp_path: Path) -> None:
    policy, other = (
        make_qwen35(tmp_path / "policy", FULL),
        make_qwen35(tmp_path / "other", FULL, vocab_size=512),
    )
    trainer = TrainerRank(TrainerConfig(dtype="fp32", reference_model=str(other)))
    with pytest.raises(ConfigError, match=r"reference_model = .*other: tensor .* has shape \(512, 64\)"):
        trainer.load(policy)
    trainer.close()
