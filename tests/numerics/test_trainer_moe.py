"""Mixture-of-experts models against transformers: tensor, sequence and expert parallel, on two processes, float32.

Qwen3.5-MoE (gated delta net and attention, shared expert; experts stored [E, out, in]) and Qwen3-VL-MoE (deepstack features;
experts stored [E, in, out] as published). Text, one image, ten images, packed together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime_cua.convert import check_hf_folder, expert_layout, read_config, tensor_table
from slime_cua.core.errors import CheckpointError
from tests.numerics.hf_reference import reference
from tests.numerics.test_trainer_layouts import worst_gradient
from tests.numerics.tiny_models import make_qwen3vl_moe, make_qwen35_moe, store_experts
from tests.numerics.trainer_cases import make_samples
from tests.numerics.trainer_matrix import run_layouts

MODELS = {"qwen35_moe": "out_in", "qwen3vl_moe": "in_out"}
LAYOUTS = ("dp2", "tp2_sp", "tp2_sp_ep2", "dp2_ep2")
TOLERANCE = {"qwen35_moe": 3e-3, "qwen3vl_moe": 1e-4}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moe")


@pytest.fixture(scope="module")
def folders(scratch: Path) -> dict[str, Path]:
    makers = {"qwen35_moe": make_qwen35_moe, "qwen3vl_moe": make_qwen3vl_moe}
    return {name: store_experts(makers[name](scratch / name), layout) for name, layout in MODELS.items()}


@pytest.fixture(scope="module")
def results(scratch: Path, folders: dict[str, Path]) -> dict[str, Any]:
    layouts = ("tp2_sp_ep2", "tp2_sp", "dp2", "dp2_ep2")
    return run_layouts(scratch / "out.pt", layouts, list(folders.values()))


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Any]:
    samples, store = make_samples(with_ten_images=True)
    return {name: reference(folder, samples, store) for name, folder in folders.items()}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_transformers_for_text_one_and_ten_images(
    results: dict[str, Any], expected: dict[str, Any], layout: str, model: str
) -> None:
    for found, wanted in zip(results[f"{layout}/{model}"]["logp"], expected[model]["logp"], strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ("dp2", "tp2_sp", "tp2_sp_ep2"))
def test_every_gradient_and_the_norm_equal_transformers(
    results: dict[str, Any], expected: dict[str, Any], layout: str, model: str
) -> None:
    found = results[f"{layout}/{model}"]
    grads = {
        name: g.transpose(1, 2) if MODELS[model] == "in_out" and ".mlp.experts." in name else g
        for name, g in found["grads"].items()
    }
    assert set(grads) == set(expected[model]["grads"])
    error, name = worst_gradient(grads, expected[model]["grads"])
    assert error < TOLERANCE[model], f"{name}: {error:.1e}"
    assert found["norm"] == pytest.approx(expected[model]["norm"], rel=1e-4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_supervised_steps_and_one_gspo_step_are_the_same_under_every_layout(
    results: dict[str, Any], layout: str, model: str
) -> None:
    found, wanted = results[f"{layout}/{model}"], results[f"dp2/{model}"]
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-3)
    assert found["losses"][-1] < found["losses"][0] - 1
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-2)
    assert found["gspo"]["loss/policy"] == pytest.approx(wanted["gspo"]["loss/policy"], rel=1e-2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_of_untrained_weights_is_bit_equal_experts_included(
    results: dict[str, Any], folders: dict[str, Path], layout: str, model: str
) -> None:
    source = load_file(folders[model] / "model.safetensors")
    found = results[f"{layout}/{model}"]["export"]
    assert set(found) == set(source)
    unequal = [k for k, v in source.items() if found[k].dtype != v.dtype or not torch.equal(found[k], v)]
    assert unequal == []


@pytest.mark.parametrize("model", MODELS)
def test_a_run_saved_at_tp2_ep2_continues_at_dp2_ep2_with_the_same_losses(
    results: dict[str, Any], model: str
) -> None:
    resumed = results[f"resumed/{model}"]
    assert resumed["step"] == 2
    assert resumed["losses"] == pytest.approx(results[f"tp2_sp_ep2/{model}"]["losses"][2:], abs=1e-3)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_batch_moves_nothing_and_an_empty_rank_does_not_hang(
    results: dict[str, Any], layout: str, model: str
) -> None:
    found = results[f"{layout}/{model}"]
    assert found["empty"]["loss/is_skipped"] == 1
    assert found["one_sample"] == pytest.approx(results[f"dp2/{model}"]["one_sample"], rel=1e-3)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["split", "out_in", "in_out"])
def test_each_way_of_storing_experts_is_recognised_by_shape(model: str, layout: str, tmp_path: Path) -> None:
    makers = {"qwen35_moe": make_qwen35_moe, "qwen3vl_moe": make_qwen3vl_moe}
    folder = store_experts(makers[model](tmp_path / model), layout)
    assert expert_layout(tensor_table(folder), read_config(folder)) == layout
    assert check_hf_folder(folder)


def test_experts_of_a_wrong_shape_and_of_two_layouts_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = store_experts(make_qwen3vl_moe(tmp_path / "model"), "out_in")
    tensors = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    save_file({**tensors, name: torch.zeros(4, 64, 47)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[4, 64, 47\].*experts, in, out"):
        check_hf_folder(folder)
    turned = tensors[name].transpose(1, 2).contiguous()
    save_file({**tensors, name: turned}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"two layouts.*{name} is in_out"):
        check_hf_folder(folder)
