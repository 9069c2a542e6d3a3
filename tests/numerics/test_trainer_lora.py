"""Adapters: start as the base model, train alike under every layout, come out merged and are resumed bit for bit; the reference is the
base model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file

from slime_cua.config.algo import LossConfig
from slime_cua.config.trainer import LoraConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from slime_cua.core.errors import CheckpointError, ConfigError
from slime_cua.launch.convert import main as convert
from slime_cua.trainer.group import LocalTrainerGroup
from slime_cua.trainer.lora import check_lora
from slime_cua.trainer.rank import TrainerRank
from tests.numerics.hf_reference import reference
from tests.numerics.tiny_models import HYBRID, make_qwen3, make_qwen35, make_qwen35_moe
from tests.numerics.trainer_cases import make_samples, samples_for

T = TypeVar("T")

NUM_STEPS = 3
LAYOUTS = {
    "tp1": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "tp2_sp": ParallelConfig(tp=2, sequence_parallel=True),  # with full recompute
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen35(tmp_path_factory.mktemp("lora") / "model", HYBRID, is_tied=False)


def config_of(parallel: ParallelConfig, **options: Any) -> TrainerConfig:
    return TrainerConfig(
        dtype="fp32",
        parallel=parallel,
        max_tokens_per_rank=512,
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0),
        **{"lora": LoraConfig(rank=4, alpha=8), **options},
    )


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    samples, store = make_samples()
    out: dict[str, Any] = {}
    for name, parallel in LAYOUTS.items():
        # The residual stream of sequence parallel asks for no gradient by itself: recomputed layers need it told.
        config = config_of(parallel, recompute="full" if parallel.sequence_parallel else "none")
        target = tmp_path_factory.mktemp(name) / "trained"
        with LocalTrainerGroup(config, start_timeout_s=600) as trainer:
            trainer.call("load", folder)
            found: dict[str, Any] = {"start": trainer.call("logprobs", samples, store)}
            steps = [trainer.call("train_step", samples, store, "sft") for _ in range(NUM_STEPS)]
            found["losses"] = [step["sft/loss"] for step in steps]
            found["norms"] = [step["sft/grad_norm"] for step in steps]
            found["logp"] = trainer.call("logprobs", samples, store)
            trainer.call("export_hf", target, "fp32")
            found["again"] = trainer.call("logprobs", samples, store)
            section = LossConfig(kl="k1", kl_coef=1.0, pi_old="proximal")
            found["kl"] = trainer.call("train_step", samples, store, "gspo", section)
            found["saved"] = target.parent / "saved"
            trainer.call("save", found["saved"], 7)
            found["before"] = continued(trainer)
            trainer.call("load", folder)
            found["step"] = trainer.call("restore", found["saved"])
            found["after"] = continued(trainer)
        found["folder"] = target
        out[name] = found
    return out


def continued(trainer: LocalTrainerGroup) -> dict[str, Any]:
    """Log-probs, then two steps and log-probs again."""
    samples, store = make_samples()
    found: dict[str, Any] = {"logp": trainer.call("logprobs", samples, store)}
    steps = [trainer.call("train_step", samples, store, "sft") for _ in range(2)]
    found["steps"] = [(step["sft/loss"], step["sft/grad_norm"]) for step in steps]
    return {**found, "end": trainer.call("logprobs", samples, store)}


def alone(folder: Path, config: TrainerConfig, work: Callable[[TrainerRank], T]) -> T:
    """What `work` gives of a trainer of one rank, in this process."""
    trainer = TrainerRank(config)
    try:
        trainer.load(folder)
        return work(trainer)
    finally:
        trainer.close()


def flat(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in values for value in row])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fresh_adapters_change_nothing(results: dict[str, Any], folder: Path, layout: str) -> None:
    samples, store = make_samples()
    wanted = reference(folder, samples, store)["logp"]
    torch.testing.assert_close(flat(results[layout]["start"]), flat(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_the_same_under_every_layout(results: dict[str, Any], layout: str) -> None:
    found, wanted = results[layout], results["tp1"]
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-4)
    assert found["losses"][-1] < found["losses"][0] - 0.02
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_merged_export_is_the_trained_policy_in_transformers(
    results: dict[str, Any], layout: str
) -> None:
    samples, store = make_samples()
    found = results[layout]
    wanted = reference(found["folder"], samples, store)["logp"]
    torch.testing.assert_close(flat(found["logp"]), flat(wanted), atol=2e-4, rtol=0)
    assert (flat(found["logp"]) - flat(found["start"])).abs().max() > 0.05
    assert torch.equal(flat(found["again"]), flat(found["logp"])), "exporting changed the weights"


def test_only_the_layers_with_adapters_differ_from_the_base_model(
    results: dict[str, Any], folder: Path
) -> None:
    source = load_file(folder / "model.safetensors")
    trained = load_file(results["tp2_sp"]["folder"] / "model.safetensors")
    changed = {name for name, tensor in source.items() if not torch.equal(tensor.float(), trained[name])}
    kinds = {name.rsplit(".", 2)[-2] for name in changed}
    assert kinds == {
        "q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b",
        "out_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert not any("visual" in name for name in changed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_is_the_base_model(results: dict[str, Any], layout: str) -> None:
    found = results[layout]
    assert found["kl"]["loss/policy"] == pytest.approx(results["tp1"]["kl"]["loss/policy"], rel=1e-3)
    assert found["kl"]["loss/grad_norm"] > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_goes_on_bit_for_bit(results: dict[str, Any], layout: str) -> None:
    found = results[layout]
    assert found["step"] == 7
    assert found["after"] == found["before"]
    assert (flat(found["after"]["end"]) - flat(found["after"]["logp"])).abs().max() > 0.01


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp"])
def test_a_checkpoint_of_two_tensor_parallel_ranks_is_the_same_policy_on_one(
    results: dict[str, Any], folder: Path, layout: str
) -> None:
    samples, store = make_samples()

    def work(trainer: TrainerRank) -> list[list[float]]:
        trainer.restore(results[layout]["saved"])
        return trainer.logprobs(samples, store)

    found = alone(folder, config_of(ParallelConfig()), work)
    torch.testing.assert_close(flat(found), flat(results[layout]["before"]["logp"]), atol=1e-4, rtol=0)


def test_reading_the_merged_weights_leaves_every_weight_where_and_what_it_was(folder: Path) -> None:
    samples, store = make_samples()

    def work(trainer: TrainerRank) -> None:
        trainer.train_step(samples, store, "sft")
        weights = dict(trainer.model.module.named_parameters())
        before = {name: (weight.data_ptr(), weight.detach().clone()) for name, weight in weights.items()}
        given = dict(trainer.named_hf_tensors())
        assert given.keys() == load_file(folder / "model.safetensors").keys()
        begun = trainer.named_hf_tensors()
        next(begun)
        with pytest.raises(AssertionError, match="read merged already"):
            list(trainer.named_hf_tensors())
        begun.close()
        for name, weight in weights.items():
            place, value = before[name]
            assert weight.data_ptr() == place and torch.equal(weight, value), name

    alone(folder, config_of(ParallelConfig()), work)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_layers_train_their_adapters_alike(
    results: dict[str, Any], folder: Path, recompute: str
) -> None:
    samples, store = make_samples()
    config = config_of(ParallelConfig(), recompute=recompute)
    steps = alone(
        folder, config, lambda trainer: [trainer.train_step(samples, store, "sft") for _ in range(NUM_STEPS)]
    )
    assert [step["sft/loss"] for step in steps] == pytest.approx(results["tp1"]["losses"], abs=1e-5)
    assert [step["sft/grad_norm"] for step in steps] == pytest.approx(results["tp1"]["norms"], rel=1e-4)


@pytest.mark.parametrize("make", [make_qwen3, make_qwen35_moe])
def test_a_text_model_and_one_with_experts_come_out_merged_too(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    base = make(tmp_path / "base")
    samples, store = samples_for(base)

    def work(trainer: TrainerRank) -> list[list[float]]:
        for _ in range(NUM_STEPS):
            trainer.train_step(samples, store, "sft")
        trainer.export_hf(tmp_path / "trained", "fp32")
        return trainer.logprobs(samples, store)

    found = flat(alone(base, config_of(ParallelConfig()), work))
    wanted, start = (flat(reference(path, samples, store)["logp"]) for path in (tmp_path / "trained", base))
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)
    assert (found - start).abs().max() > 0.05


def test_a_checkpoint_of_adapters_is_refused_where_its_scale_is_not_known(
    results: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    saved = str(results["tp2"]["saved"])
    with pytest.raises(CheckpointError, match=r"holds adapters without the scale .* call export_hf"):
        convert(["to-hf", "--checkpoint", saved, "--hf", str(folder), "--out", str(tmp_path / "back")])
    assert not (tmp_path / "back").exists()
    with pytest.raises(CheckpointError, match=r"adapters of rank 4 on attention, feed_forward.*no adapters"):
        alone(folder, config_of(ParallelConfig(), lora=LoraConfig()), lambda trainer: trainer.restore(saved))


def test_adapters_of_experts_that_tensor_parallelism_would_cut_are_refused() -> None:
    config = TrainerConfig(parallel=ParallelConfig(tp=2, sequence_parallel=True), lora=LoraConfig(rank=4))
    with pytest.raises(ConfigError, match=r"needs trainer\.parallel\.ep > 1 at tp > 1"):
        check_lora(config, num_experts=4)
    check_lora(config, num_experts=0)
