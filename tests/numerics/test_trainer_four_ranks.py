"""Four ranks: TP=4 with and without sequence parallel, TP=2 with DP=2, and experts over all four, against transformers.

Heads that four divides, a vocabulary that it does not, an untied head, MTP tensors beside the model. The same ranks say how many
numbers they hold and how many patches their vision tower sees, against `slime-cua plan` and a count by hand.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_cua.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slime_cua.convert import read_config
from slime_cua.core.ports import free_port
from slime_cua.trainer.plan import Workload, plan
from slime_cua.trainer.rank import TrainerRank
from tests.numerics.hf_reference import reference
from tests.numerics.tiny_models import HYBRID, make_qwen35, make_qwen35_moe
from tests.numerics.trainer_cases import make_samples
from tests.numerics.trainer_matrix import gradients
from tests.numerics.warm_ranks import run_together

VOCAB = 383
NUM_STEPS, SAVED_AFTER = 4, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp4": {"parallel": ParallelConfig(tp=4), "recompute": "selective"},
    "tp4_sp": {"parallel": ParallelConfig(tp=4, sequence_parallel=True)},
    "tp2_dp2": {"parallel": ParallelConfig(tp=2, dp=2, sequence_parallel=True)},
    "experts": {"parallel": ParallelConfig(tp=2, dp=2, ep=4, sequence_parallel=True)},
}
DENSE = ("tp4", "tp4_sp", "tp2_dp2")
WHOLE_GRADIENTS = ("tp4", "tp4_sp")
"""With DP the distributed optimiser keeps each rank's share only."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def config_of(layout: str) -> TrainerConfig:
    return TrainerConfig(
        dtype="fp32",
        max_tokens_per_rank=208,
        freeze_vision=False,
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.01),
        **LAYOUTS[layout],
    )


def make_dense(folder: Path) -> Path:
    """Qwen3.5 with gated delta net: 8 heads over 4, 4 linear heads for keys and 8 for values."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    small = Qwen3_5Config.from_pretrained(make_qwen35(folder, HYBRID, is_tied=False, vocab_size=VOCAB))
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    heads |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    small.text_config = type(small.text_config)(**{**small.text_config.to_dict(), **heads})
    torch.manual_seed(1)
    model = Qwen3_5ForConditionalGeneration(small)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (0.06 if parameter.dim() > 1 else 0.2)
                + (parameter.dim() == 1) * parameter
            )
    model.to(torch.bfloat16).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    heads_of_mtp = {"mtp.fc.weight": torch.randn(3, 5).bfloat16(), "mtp.norm.weight": torch.randn(7)}
    save_file({**weights, **heads_of_mtp}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def numbers_held(trainer: TrainerRank) -> dict[str, int]:
    """How many this rank has: weights, gradients, and of one of the optimiser's moments."""
    optimizer = trainer.optimizer
    parts = getattr(optimizer.megatron, "chained_optimizers", [optimizer.megatron])
    buffers = [*optimizer.ddp.buffers, *optimizer.ddp.expert_parallel_buffers]
    return {
        "weights": sum(p.numel() for p in trainer.model.module.parameters()),
        "gradients": sum(buffer.grad_data.numel() for buffer in buffers),
        "moment": sum(s["exp_avg"].numel() for part in parts for s in part.optimizer.state.values()),
    }


def run_layout(trainer: TrainerRank, folder: Path, layout: str, scratch: Path) -> dict[str, Any]:
    samples, store = make_samples(with_ten_images=True)
    trainer.load(folder)
    out: dict[str, Any] = {"logp": trainer.logprobs(samples, store)}
    trainer.export_hf(scratch / f"export_{layout}")
    if layout in WHOLE_GRADIENTS:
        out.update(gradients(trainer, samples, store))
        trainer.load(folder)
    seen = watch_tower(trainer)
    out["losses"] = []
    for step in range(NUM_STEPS):
        if layout == "tp4_sp" and step == SAVED_AFTER:
            trainer.save(scratch / "saved", step)
        out["losses"].append(trainer.train_step(samples, store, "sft")["sft/loss"])
    out["patches"] = [sum(seen), num_patches(trainer, samples)]
    out["held"] = numbers_held(trainer)
    out["trained_logp"] = trainer.logprobs(samples, store)
    trainer.export_hf(scratch / f"trained_{layout}", dtype="fp32")
    return out


def watch_tower(trainer: TrainerRank) -> list[int]:
    """A list that grows by the patches of every run of this rank's tower."""
    tower, seen = trainer.model.vision, list[int]()
    assert tower is not None
    run = tower._run

    def counted(patches: torch.Tensor, **options: Any) -> Any:
        seen.append(len(patches))
        return run(patches, **options)

    tower._run = counted
    return seen


def num_patches(trainer: TrainerRank, samples: Any) -> int:
    """Patches of the distinct images of this rank's micro-batches, over all steps."""
    share = trainer._pack(samples).micro_batches[trainer.layout.dp_rank]
    grids = [trainer._patches.grid_hw(r.width_px, r.height_px) for p in share for r in p.distinct_images]
    return NUM_STEPS * sum(rows * columns for rows, columns in grids)


def resume(trainer: TrainerRank, folder: Path, scratch: Path) -> list[float]:
    samples, store = make_samples(with_ten_images=True)
    trainer.load(folder)
    assert trainer.restore(scratch / "saved") == SAVED_AFTER
    return [trainer.train_step(samples, store, "sft")["sft/loss"] for _ in range(NUM_STEPS - SAVED_AFTER)]


def serve(rank: int, ports: dict[str, int], dense: Path, experts: Path, scratch: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    found: dict[str, Any] = {}
    for layout, port in ports.items():
        trainer = TrainerRank(config_of(layout), rank, 4, "127.0.0.1", port)
        found[layout] = run_layout(trainer, experts if layout == "experts" else dense, layout, scratch)
        if layout == "tp2_dp2":
            found["resumed"] = resume(trainer, dense, scratch)
        trainer.close()
    torch.save(found, scratch / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="module")
def folders(scratch: Path) -> dict[str, Path]:
    return {"dense": make_dense(scratch / "dense"), "experts": make_qwen35_moe(scratch / "experts")}


@pytest.fixture(scope="module")
def ranks(scratch: Path, folders: dict[str, Path]) -> list[dict[str, Any]]:
    """What each rank found, by layout."""
    ports = {layout: free_port() for layout in LAYOUTS}
    arguments = (ports, folders["dense"], folders["experts"], scratch)
    run_together(serve, [(rank, *arguments) for rank in range(4)], timeout_s=1700)
    return [torch.load(scratch / f"rank{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Any]:
    samples, store = make_samples(with_ten_images=True)
    return {name: reference(folder, samples, store) for name, folder in folders.items()}


def kind_of(layout: str) -> str:
    return "experts" if layout == "experts" else "dense"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_transformers(
    ranks: list[dict[str, Any]], expected: dict[str, Any], layout: str
) -> None:
    wanted = expected[kind_of(layout)]["logp"]
    for found, values in zip(ranks[0][layout]["logp"], wanted, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(values), atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", WHOLE_GRADIENTS)
def test_every_gradient_and_the_norm_equal_transformers(
    ranks: list[dict[str, Any]], expected: dict[str, Any], layout: str
) -> None:
    found, wanted = ranks[0][layout], expected["dense"]
    for name, gradient in wanted["grads"].items():
        error = (found["grads"][name].reshape(gradient.shape) - gradient).abs().max() / gradient.abs().max()
        assert error < 3e-3, f"{name}: {error:.1e}"
    assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_folder_comes_back_byte_for_byte(
    ranks: list[dict[str, Any]], folders: dict[str, Path], scratch: Path, layout: str
) -> None:
    source, target = folders[kind_of(layout)], scratch / f"export_{layout}"
    assert sorted(p.name for p in target.iterdir()) == sorted(p.name for p in source.iterdir())
    for path in source.iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("layout", ["tp4_sp", "experts"])
def test_a_trained_export_gives_the_trainers_logprobs_in_transformers(
    ranks: list[dict[str, Any]], scratch: Path, layout: str
) -> None:
    found = reference(scratch / f"trained_{layout}", *make_samples(with_ten_images=True))["logp"]
    for own, wanted, before in zip(
        found, ranks[0][layout]["trained_logp"], ranks[0][layout]["logp"], strict=True
    ):
        torch.testing.assert_close(torch.tensor(own), torch.tensor(wanted), atol=1e-4, rtol=0)
        assert (torch.tensor(wanted) - torch.tensor(before)).abs().max() > 0.1


@pytest.mark.parametrize("layout", DENSE)
def test_supervised_steps_are_the_same_under_every_layout(ranks: list[dict[str, Any]], layout: str) -> None:
    losses = ranks[0][layout]["losses"]
    assert losses == pytest.approx(ranks[0]["tp4_sp"]["losses"], abs=1e-4)
    assert losses[-1] < losses[0] - 0.5


def test_a_run_saved_at_tp4_continues_at_tp2_with_dp2(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["resumed"] == pytest.approx(ranks[0]["tp4_sp"]["losses"][SAVED_AFTER:], abs=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_parallel_ranks_divide_the_patches_among_them(
    ranks: list[dict[str, Any]], layout: str
) -> None:
    """No patch is seen twice; images are whole, so shares are only about even."""
    tp = LAYOUTS[layout]["parallel"].tp
    for first in range(0, 4, tp):
        seen = [ranks[first + place][layout]["patches"] for place in range(tp)]
        assert sum(patches for patches, _ in seen) == seen[0][1] > 0
        assert max(patches for patches, _ in seen) < 0.75 * seen[0][1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_hold_as_many_numbers_as_the_plan_says(
    ranks: list[dict[str, Any]], folders: dict[str, Path], layout: str
) -> None:
    """Up to the padding of vocabulary and buffers, and to bounds of the optimiser's shards between tensors."""
    parallel = LAYOUTS[layout]["parallel"]
    planned = plan(read_config(folders[kind_of(layout)]), parallel, Workload(208, is_vision_frozen=False))
    pads = 0 if layout == "experts" else 2 * 64 * (-VOCAB % parallel.tp) / parallel.tp
    assert [rank[layout]["held"]["weights"] - pads for rank in ranks] == [planned.weights / 2] * 4
    for rank in ranks:
        held = rank[layout]["held"]
        assert held["gradients"] == pytest.approx(planned.gradients / 4, rel=0.01)
    moments = sum(rank[layout]["held"]["moment"] for rank in ranks)
    assert moments == pytest.approx(4 * planned.optimizer / 12, rel=0.01)
