"""Adapters: start as the base model, train alike under every layout, come out merged; the reference is the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime_cua.config.algo import LossConfig
from slime_cua.config.trainer import LoraConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from slime_cua.core.errors import ConfigError
from slime_cua.trainer.group import LocalTrainerGroup
from slime_cua.trainer.lora import check_lora
from tests.numerics.hf_reference import reference
from tests.numerics.tiny_models import HYBRID, make_qwen35
from tests.numerics.trainer_cases import make_samples

NUM_STEPS = 3
LAYOUTS = {
    "tp1": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "tp2_sp": ParallelConfig(tp=2, sequence_parallel=True),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen35(tmp_path_factory.mktemp("lora") / "model", HYBRID, is_tied=False)


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    samples, store = make_samples()
    out: dict[str, Any] = {}
    for name, parallel in LAYOUTS.items():
        config = TrainerConfig(
            dtype="fp32",
            parallel=parallel,
            max_tokens_per_rank=512,
            optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0),
            lora=LoraConfig(rank=4, alpha=8),
        )
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
            trainer.call("save", target.parent / "saved", 7)
            trainer.call("load", folder)
            found["step"] = trainer.call("restore", target.parent / "saved")
            found["restored"] = trainer.call("logprobs", samples, store)
        found["folder"] = target
        out[name] = found
    return out


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
def test_the_reference_is_the_base_model_and_a_checkpoint_brings_the_adapters_back(
    results: dict[str, Any], layout: str
) -> None:
    found = results[layout]
    assert found["kl"]["loss/policy"] == pytest.approx(results["tp1"]["kl"]["loss/policy"], rel=1e-3)
    assert found["kl"]["loss/grad_norm"] > 0
    assert found["step"] == 7
    assert (flat(found["restored"]) - flat(found["start"])).abs().max() > 0.05


def test_adapters_of_experts_that_tensor_parallelism_would_cut_are_refused() -> None:
    config = TrainerConfig(parallel=ParallelConfig(tp=2, sequence_parallel=True), lora=LoraConfig(rank=4))
    with pytest.raises(ConfigError, match=r"needs trainer\.parallel\.ep > 1 at tp > 1"):
        check_lora(config, num_experts=4)
    check_lora(config, num_experts=0)
