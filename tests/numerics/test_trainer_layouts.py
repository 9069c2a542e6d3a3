"""The trainer against transformers, under TP, SP, DP, recompute and the distributed optimiser: one start for all layouts.

tp2_recompute packs everything into one micro-batch, the others into several. Four models (Qwen3.5 with full attention only, tied;
Qwen3.5 with gated delta net, untied; Qwen3-VL with deepstack features; Qwen3, text only), six ragged samples with no, one, several
and ten images, float32. Tolerances are float32 noise; gated delta net's chunked recurrence orders its sums otherwise than transformers'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.numerics.hf_reference import reference
from tests.numerics.tiny_models import FULL, HYBRID, make_qwen3, make_qwen3vl, make_qwen35
from tests.numerics.trainer_cases import samples_for
from tests.numerics.trainer_matrix import run_layouts

MODELS = ("full", "hybrid", "vl", "text")
LAYOUTS = ("tp2", "tp2_sp", "tp2_recompute", "dp2", "dp2_distopt")
WITH_GRADIENTS = tuple(name for name in LAYOUTS if name != "dp2_distopt")
GRADIENT_TOLERANCE = {"full": 1e-4, "hybrid": 3e-3, "vl": 1e-4, "text": 1e-4}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def folders(scratch: Path) -> dict[str, Path]:
    return {
        "full": make_qwen35(scratch / "full", FULL, is_tied=True),
        "hybrid": make_qwen35(scratch / "hybrid", HYBRID, is_tied=False),
        "vl": make_qwen3vl(scratch / "vl"),
        "text": make_qwen3(scratch / "text"),
    }


@pytest.fixture(scope="module")
def results(scratch: Path, folders: dict[str, Path]) -> dict[str, Any]:
    return run_layouts(scratch / "out.pt", LAYOUTS, list(folders.values()))


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: reference(folder, *samples_for(folder)) for name, folder in folders.items()}


def worst_gradient(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest difference of any tensor relative to its largest entry, and that tensor's name."""
    errors = {
        name: float((found[name].reshape(g.shape) - g).abs().max() / g.abs().max())
        for name, g in expected.items()
    }
    name = max(errors, key=lambda key: errors[key])
    return errors[name], name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_transformers_for_text_images_and_repeated_images(
    results: dict[str, Any], expected: dict[str, Any], layout: str, model: str
) -> None:
    for found, wanted in zip(results[f"{layout}/{model}"]["logp"], expected[model]["logp"], strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", WITH_GRADIENTS)
def test_every_gradient_and_the_norm_equal_transformers(
    results: dict[str, Any], expected: dict[str, Any], layout: str, model: str
) -> None:
    found = results[f"{layout}/{model}"]
    error, name = worst_gradient(found["grads"], expected[model]["grads"])
    assert error < GRADIENT_TOLERANCE[model], f"{name}: {error:.1e}"
    assert found["norm"] == pytest.approx(expected[model]["norm"], rel=1e-5)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_supervised_steps_and_one_gspo_step_are_the_same_under_every_layout(
    results: dict[str, Any], layout: str, model: str
) -> None:
    found, wanted = results[f"{layout}/{model}"], results[f"dp2/{model}"]
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-4)
    assert found["losses"][-1] < found["losses"][0] - 1
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-3)
    assert found["gspo"]["loss/policy"] == pytest.approx(wanted["gspo"]["loss/policy"], rel=1e-3)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_of_untrained_weights_is_bit_equal(
    results: dict[str, Any], folders: dict[str, Path], layout: str, model: str
) -> None:
    source = load_file(folders[model] / "model.safetensors")
    found = results[f"{layout}/{model}"]["export"]
    assert set(found) == set(source)
    unequal = [k for k, v in source.items() if found[k].dtype != v.dtype or not torch.equal(found[k], v)]
    assert unequal == []


@pytest.mark.parametrize("model", MODELS)
def test_exported_folder_is_the_loaded_one_again(
    results: dict[str, Any], folders: dict[str, Path], scratch: Path, model: str
) -> None:
    target = scratch / f"export_{model}"
    assert sorted(p.name for p in target.iterdir()) == sorted(p.name for p in folders[model].iterdir())
    assert (target / "config.json").read_bytes() == (folders[model] / "config.json").read_bytes()
    assert (target / "model.safetensors").read_bytes() == (folders[model] / "model.safetensors").read_bytes()


@pytest.mark.parametrize("model", MODELS)
def test_a_run_saved_at_tp2_continues_at_tp1_with_the_same_losses(
    results: dict[str, Any], model: str
) -> None:
    resumed = results[f"resumed/{model}"]
    assert resumed["step"] == 2
    assert resumed["losses"] == pytest.approx(results[f"tp2/{model}"]["losses"][2:], abs=1e-4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_batch_moves_nothing_and_an_empty_rank_does_not_hang(
    results: dict[str, Any], layout: str, model: str
) -> None:
    found = results[f"{layout}/{model}"]
    assert found["empty"]["loss/is_skipped"] == 1
    assert found["empty"]["loss/policy"] == 0
    assert found["one_sample"] == pytest.approx(results[f"tp2/{model}"]["one_sample"], rel=1e-4)


def test_without_its_patch_the_output_norm_gradient_is_partial_at_tp2(
    results: dict[str, Any], expected: dict[str, Any]
) -> None:
    error, name = worst_gradient(
        results["tp2/hybrid"]["without_output_norm"]["grads"], expected["hybrid"]["grads"]
    )
    assert error > 0.3
    assert name.endswith("linear_attn.norm.weight")


def test_without_its_patch_the_input_norm_gradient_is_doubled_under_sequence_parallel(
    results: dict[str, Any], expected: dict[str, Any]
) -> None:
    error, name = worst_gradient(
        results["tp2_sp/hybrid"]["with_input_norm_flag"]["grads"], expected["hybrid"]["grads"]
    )
    assert error == pytest.approx(1.0, abs=1e-3)
    assert name.endswith("input_layernorm.weight")


def test_without_its_patch_the_deepstack_gradient_is_wrong_under_sequence_parallel(
    results: dict[str, Any], expected: dict[str, Any]
) -> None:
    error, name = worst_gradient(
        results["tp2_sp/vl"]["without_deepstack_sum"]["grads"], expected["vl"]["grads"]
    )
    assert error > 0.1
    assert "visual" in name
