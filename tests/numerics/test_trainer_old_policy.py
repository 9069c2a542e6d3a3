"""The trainer under each choice of pi_old, with a reference, with masking, and on nothing: against hand-made numbers.

The expected losses are loops over the log-probs that the trainer gives before and after its steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slime_cua.config.algo import LossConfig
from slime_cua.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slime_cua.core.errors import ConfigError, DataError
from slime_cua.trainer.gap import gap_metrics, gap_sums
from slime_cua.trainer.group import LocalTrainerGroup
from tests.numerics.tiny_models import make_qwen35
from tests.numerics.trainer_cases import IMAGE_TOKEN, make_samples

SAMPLES, STORE = make_samples()
WIDE = {"eps_low": 0.9, "eps_high": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen35(tmp_path_factory.mktemp("old_policy") / "model")


@pytest.fixture(scope="module")
def spawned() -> Iterator[LocalTrainerGroup]:
    config = TrainerConfig(
        dtype="fp32", max_tokens_per_rank=96, optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.5)
    )
    with LocalTrainerGroup(config) as trainer:
        yield trainer


@pytest.fixture
def trainer(spawned: LocalTrainerGroup, folder: Path) -> LocalTrainerGroup:
    spawned.call("load", folder)
    return spawned


def engine_logp() -> list[list[float]]:
    return [[x for x, t in zip(s.segment.logp, s.segment.is_trained, strict=True) if t] for s in SAMPLES]


def step_mean(sample, values: list[float]) -> float:
    """Mean over steps of the mean over a step's tokens."""
    steps = [k for k in sample.segment.step_of_token if k >= 0]
    means = [
        np.mean([v for v, k in zip(values, steps, strict=True) if k == step]) for step in sorted(set(steps))
    ]
    return float(np.mean(means))


def differences(sample_index: int, new: list[list[float]], old: list[list[float]]) -> list[float]:
    return [a - b for a, b in zip(new[sample_index], old[sample_index], strict=True)]


def log_ratios(new: list[list[float]], old: list[list[float]]) -> list[float]:
    return [step_mean(sample, differences(i, new, old)) for i, sample in enumerate(SAMPLES)]


def step(trainer: LocalTrainerGroup, section: LossConfig, **options) -> dict[str, float]:
    return trainer.call("train_step", SAMPLES, STORE, "gspo", section=section, **options)


def kinds_of_tokens() -> dict[str, np.ndarray]:
    """Of every trained token, in the samples' order: its action's type, and whether an image stands before it."""
    tokens = [
        (s.segment.step_types[step], IMAGE_TOKEN in s.segment.token_ids[:place])
        for s in SAMPLES
        for place, step in enumerate(s.segment.step_of_token)
        if step >= 0
    ]
    types, sees = np.array([kind for kind, _ in tokens]), np.array([seen for _, seen in tokens])
    return {"gui": types == "gui", "code": types == "code", "image": sees, "text": ~sees}


def test_engine_ratio_and_the_gap_on_tokens_of_the_current_version(trainer: LocalTrainerGroup) -> None:
    now, engine = trainer.call("logprobs", SAMPLES, STORE), engine_logp()
    metrics = step(trainer, LossConfig(**WIDE), policy_version=0)
    ratios = [math.exp(x) for x in log_ratios(now, engine)]
    loss = -np.mean([s.advantage * w for s, w in zip(SAMPLES, ratios, strict=True)])
    assert metrics["loss/ratio_mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-4)
    gaps = np.abs(np.concatenate([differences(i, now, engine) for i in range(len(SAMPLES))]))
    assert metrics["gap/logp_abs_mean"] == pytest.approx(gaps.mean(), rel=1e-5)
    assert metrics["gap/logp_abs_p99"] == pytest.approx(
        np.sort(gaps)[math.ceil(0.99 * len(gaps)) - 1], rel=0.06
    )
    for kind, has_kind in kinds_of_tokens().items():
        assert metrics[f"gap/logp_abs_mean/{kind}"] == pytest.approx(gaps[has_kind].mean(), rel=1e-5), kind
        assert metrics[f"gap/logp_abs_p99/{kind}"] == pytest.approx(
            np.sort(gaps[has_kind])[math.ceil(0.99 * has_kind.sum()) - 1], rel=0.06
        )
    assert "gap/logp_abs_mean/mcp" not in metrics
    later = step(trainer, LossConfig(**WIDE), policy_version=1)
    assert "gap/logp_abs_mean" not in later  # every token is of version 0


def test_proximal_has_ratio_one_at_the_first_step_and_the_true_change_at_the_second(
    trainer: LocalTrainerGroup,
) -> None:
    section = LossConfig(pi_old="proximal", correction_cap=1.02, **WIDE)
    start, engine = trainer.call("logprobs", SAMPLES, STORE), engine_logp()
    factors = [min(math.exp(x), 1.02) for x in log_ratios(start, engine)]
    assert any(f == 1.02 for f in factors) and any(f < 1.02 for f in factors)
    first = step(trainer, section, policy_version=3)
    assert first["loss/ratio_mean"] == 1.0 and first["loss/clip_fraction"] == 0.0
    loss = -np.mean([s.advantage * f for s, f in zip(SAMPLES, factors, strict=True)])
    assert first["loss/policy"] == pytest.approx(loss, rel=1e-4)
    now = trainer.call("logprobs", SAMPLES, STORE)
    second = step(trainer, section, start_logp=start, policy_version=3)
    ratios = [math.exp(x) for x in log_ratios(now, start)]
    assert second["loss/ratio_mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert second["loss/ratio_mean"] != 1.0
    with pytest.raises(DataError, match=r"s0 has .* 0 start log-probs"):
        step(trainer, section, start_logp=[[]] * len(SAMPLES))


def test_behaviour_uses_the_weights_that_sampled_and_says_when_they_are_lost(
    trainer: LocalTrainerGroup, folder: Path
) -> None:
    section = LossConfig(pi_old="behaviour", **WIDE)
    sampled = trainer.call("logprobs", SAMPLES, STORE)
    first = step(trainer, section, policy_version=0)
    assert first["loss/ratio_mean"] == 1.0 and "loss/old_from_engine_share" not in first
    now = trainer.call("logprobs", SAMPLES, STORE)
    second = step(trainer, section, policy_version=1)
    ratios = [math.exp(x) for x in log_ratios(now, sampled)]
    assert second["loss/ratio_mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert "loss/old_from_engine_share" not in second
    trainer.call("load", folder)
    lost = step(trainer, section, policy_version=1)
    assert lost["loss/old_from_engine_share"] == 1.0
    ratios = [math.exp(x) for x in log_ratios(sampled, engine_logp())]
    assert lost["loss/ratio_mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
    with pytest.raises(ConfigError, match="needs policy_version"):
        step(trainer, section)


def test_a_kl_term_is_towards_the_folder_that_was_loaded_also_after_a_restart(
    trainer: LocalTrainerGroup, folder: Path, tmp_path: Path
) -> None:
    section = LossConfig(kl="k3", kl_coef=0.7, **WIDE)
    reference = trainer.call("logprobs", SAMPLES, STORE)
    trainer.call("train_step", SAMPLES, STORE, "sft")
    trainer.call("save", tmp_path, 1)
    now = trainer.call("logprobs", SAMPLES, STORE)
    ratios = [math.exp(x) for x in log_ratios(now, engine_logp())]
    kl = []
    for i, sample in enumerate(SAMPLES):
        gaps = differences(i, now, reference)
        kl.append(step_mean(sample, [math.exp(-d) - 1 + d for d in gaps]))
    expected = -np.mean([s.advantage * w - 0.7 * k for s, w, k in zip(SAMPLES, ratios, kl, strict=True)])
    assert np.mean(kl) > 1e-3
    assert step(trainer, section)["loss/policy"] == pytest.approx(expected, rel=1e-4)
    trainer.call("load", folder)
    trainer.call("restore", tmp_path)
    assert step(trainer, section)["loss/policy"] == pytest.approx(expected, rel=1e-4)


def test_masking_drops_negative_segments_that_have_moved_too_far(trainer: LocalTrainerGroup) -> None:
    now = trainer.call("logprobs", SAMPLES, STORE)
    logs = log_ratios(now, engine_logp())
    negative = [-x for x, s in zip(logs, SAMPLES, strict=True) if s.advantage < 0]
    limit = sum(sorted(negative)[-2:]) / 2
    assert limit > 0
    kept = [s.advantage >= 0 or -x <= limit for s, x in zip(SAMPLES, logs, strict=True)]
    assert sum(kept) == len(SAMPLES) - 1
    terms = [s.advantage * math.exp(x) for s, x, k in zip(SAMPLES, logs, kept, strict=True) if k]
    metrics = step(trainer, LossConfig(off_policy_max_gap=limit, **WIDE))
    assert metrics["loss/policy"] == pytest.approx(-sum(terms) / len(SAMPLES), rel=1e-4)


def test_an_empty_step_leaves_weights_moments_and_decay_untouched_and_is_counted(
    trainer: LocalTrainerGroup, folder: Path, tmp_path: Path
) -> None:
    silent = [s.model_copy(update={"advantage": 0.0}) for s in SAMPLES]
    for name, idle in {"without": [], "with": [[], silent]}.items():
        trainer.call("load", folder)
        step(trainer, LossConfig())
        for samples in idle:
            metrics = trainer.call("train_step", samples, STORE, "gspo")
            assert metrics["loss/is_skipped"] == 1 and metrics["loss/policy"] == 0
        step(trainer, LossConfig())
        trainer.call("export_hf", tmp_path / name, "fp32")
    with_, without = (load_file(tmp_path / name / "model.safetensors") for name in ("with", "without"))
    assert all(torch.equal(with_[name], without[name]) for name in without)


def test_numbers_that_one_data_parallel_rank_cannot_use_are_the_same_error_on_both(folder: Path) -> None:
    """s0 was sampled, it claims, with a probability of exp(-500): its ratio overflows on the rank that holds it."""
    bad = SAMPLES[0].segment.model_copy(
        update={"logp": tuple(-500.0 if t else 0.0 for t in SAMPLES[0].segment.is_trained)}
    )
    samples = [SAMPLES[0].model_copy(update={"segment": bad, "advantage": -1.0}), *SAMPLES[1:]]
    config = TrainerConfig(dtype="fp32", max_tokens_per_rank=96, timeout_s=60, parallel=ParallelConfig(dp=2))
    with LocalTrainerGroup(config) as pair:
        pair.call("load", folder)
        with pytest.raises(DataError, match="importance ratio overflows"):
            pair.call("train_step", samples, STORE, "gspo")
        assert pair.call("train_step", SAMPLES, STORE, "gspo")["loss/is_skipped"] == 0


def test_the_gap_adds_over_ranks_and_its_percentile_is_within_six_per_cent() -> None:
    gaps = torch.rand(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 4
    is_current = torch.ones(5000, dtype=torch.bool)
    zero = torch.zeros(5000, dtype=torch.float64)
    whole = gap_sums(gaps, zero, is_current)
    parts = [gap_sums(gaps[rows], zero[rows], is_current[rows]) for rows in (slice(0, 7), slice(7, None))]
    for name, value in whole.items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], value)
    found = gap_metrics(flat(whole))
    assert found["gap/logp_abs_mean"] == pytest.approx(float(gaps.mean()))
    assert found["gap/logp_abs_p99"] == pytest.approx(float(gaps.sort().values[4949]), rel=0.06)
    assert gap_metrics({}) == {}


def flat(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """As a step reports them: each bin by its place."""
    found = {name: float(value) for name, value in sums.items() if value.dim() == 0}
    for name, value in sums.items():
        if value.dim():
            found |= {f"{name}/{place}": number for place, number in enumerate(value.tolist())}
    return found


def test_the_gap_of_each_kind_is_over_its_own_current_tokens() -> None:
    gaps = torch.tensor([0.1, 0.2, 0.4, 0.8, 5.0], dtype=torch.float64)
    is_current = torch.tensor([True, True, True, True, False])
    kind = torch.tensor([0, 1, 1, 0, 1])
    found = gap_sums(
        gaps, torch.zeros(5), is_current, [(("gui", "code", "mcp"), kind), (("text", "image"), 1 - kind)]
    )
    for name in ("gui", "image"):
        assert gap_metrics(flat(found), name) == {
            f"gap/logp_abs_mean/{name}": pytest.approx(0.45),
            f"gap/logp_abs_p99/{name}": pytest.approx(0.8, rel=0.06),
        }
    for name in ("code", "text"):
        assert gap_metrics(flat(found), name)[f"gap/logp_abs_mean/{name}"] == pytest.approx(0.3)
    assert gap_metrics(flat(found), "mcp") == {}
