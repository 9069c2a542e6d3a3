"""A spawned trainer: errors come back as themselves, a failed save keeps what was there, a dead rank ends the group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_cua.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slime_cua.core.errors import CheckpointError, ConfigError, DataError, InfrastructureError
from slime_cua.trainer import checkpoint
from slime_cua.trainer.group import LocalTrainerGroup
from slime_cua.trainer.runtime import check_layout
from tests.numerics.tiny_models import HYBRID, make_qwen35
from tests.numerics.trainer_cases import MemoryStore, make_samples
from tests.numerics.warm_ranks import warm_groups

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def warm_starts() -> None:
    """Instead of conftest's: ranks are spawned."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen35(tmp_path_factory.mktemp("group") / "model")


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[LocalTrainerGroup]:
    config = TrainerConfig(max_tokens_per_rank=96, optimizer=OptimizerConfig(lr=1e-3))
    with LocalTrainerGroup(config) as trainer:
        trainer.call("load", folder)
        yield trainer


def test_ranks_meet_also_where_torchrun_keeps_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with LocalTrainerGroup(TrainerConfig(parallel=ParallelConfig(dp=2), timeout_s=60.0)) as trainer:
        assert trainer.call_all("finish_save") == [None, None]


def test_a_bf16_step_moves_the_language_model_and_leaves_a_frozen_vision_tower(
    group: LocalTrainerGroup, folder: Path, tmp_path: Path
) -> None:
    samples, store = make_samples()
    group.call("load", folder)
    before = group.call("logprobs", samples, store)
    metrics = group.call("train_step", samples, store, "sft", policy_version=3)
    assert metrics["sft/loss"] == pytest.approx(-sum(map(sum, before)) / sum(map(len, before)), abs=1e-3)
    assert metrics["loss/policy_version"] == 3
    group.call("export_hf", tmp_path / "out")
    old, new = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    is_equal = {name: torch.equal(old[name], new[name]) for name in old}
    assert all(same for name, same in is_equal.items() if name.startswith("model.visual."))
    assert not any(
        same for name, same in is_equal.items() if name.endswith("proj.weight") and "visual" not in name
    )


def test_temperature_divides_the_logits(group: LocalTrainerGroup, folder: Path) -> None:
    samples, store = make_samples()
    group.call("load", folder)
    cold = group.call("logprobs", samples[:1], store, temperature=0.01)
    hot = group.call("logprobs", samples[:1], store, temperature=100.0)
    uniform = -torch.log(torch.tensor(384.0)).item()
    assert hot[0] == pytest.approx([uniform] * len(hot[0]), abs=0.1)
    assert min(cold[0]) < 5 * uniform


def test_a_frozen_tower_remembers_images_and_restoring_weights_forgets_them(
    group: LocalTrainerGroup, folder: Path, tmp_path: Path
) -> None:
    samples, store = make_samples()
    group.call("load", folder)
    group.call("save", tmp_path, 1)
    first = group.call("logprobs", samples, store)
    without_pixels = MemoryStore()
    assert group.call("logprobs", samples, without_pixels) == first
    group.call("restore", tmp_path)
    store_again = group.call("logprobs", samples, store)
    assert store_again == first


def test_float32_decay_parameters_stay_so_in_a_bf16_run(group: LocalTrainerGroup, tmp_path: Path) -> None:
    mixed = make_qwen35(tmp_path / "mixed", HYBRID)
    stored = load_file(mixed / "model.safetensors")
    decay = {name: tensor.float() + 1e-4 for name, tensor in stored.items() if name.endswith("A_log")}
    save_file({**stored, **decay}, mixed / "model.safetensors", metadata={"format": "pt"})
    samples, store = make_samples()
    group.call("load", mixed)
    group.call("export_hf", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (mixed / "model.safetensors").read_bytes()
    losses = [group.call("train_step", samples, store, "sft")["sft/loss"] for _ in range(2)]
    group.call("save", tmp_path / "saved", 1)
    before = group.call("logprobs", samples, store)
    group.call("load", mixed)
    group.call("restore", tmp_path / "saved")
    assert group.call("logprobs", samples, store) == before
    assert losses[1] < losses[0]


def test_errors_of_ours_come_back_as_themselves(
    group: LocalTrainerGroup, folder: Path, tmp_path: Path
) -> None:
    samples, store = make_samples()
    with pytest.raises(CheckpointError, match="does not exist"):
        group.call("load", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"loss 'ppo' is unknown; known: .*gspo"):
        group.call("train_step", samples, store, "ppo")
    big = samples[2].segment.model_copy(
        update={
            name: getattr(samples[2].segment, name) * 5
            for name in ("token_ids", "is_trained", "logp", "versions", "step_of_token", "images")
        }
    )
    with pytest.raises(DataError, match=r"segment s2 has .* tokens .* the budget is 96"):
        group.call("train_step", [samples[2].model_copy(update={"segment": big})], store, "gspo")


def test_a_batch_without_advantage_moves_nothing(group: LocalTrainerGroup, folder: Path) -> None:
    samples, store = make_samples()
    group.call("load", folder)
    before = group.call("logprobs", samples, store)
    flat = [sample.model_copy(update={"advantage": 0.0}) for sample in samples]
    assert group.call("train_step", flat, store, "gspo")["loss/is_skipped"] == 1
    assert group.call("logprobs", samples, store) == before


def test_a_failed_save_says_why_and_keeps_what_was_there(
    group: LocalTrainerGroup, folder: Path, tmp_path: Path
) -> None:
    group.call("load", folder)
    group.call("save", tmp_path, 1)
    (tmp_path / ".unfinished-step_00000002").write_text("a file where the draft must go")
    with pytest.raises(
        CheckpointError, match=r"step_00000002 was not written, what was there is kept; rank 0: "
    ):
        group.call("save", tmp_path, 2)
    assert checkpoint.latest(tmp_path) == 1
    (tmp_path / ".unfinished-step_00000002").unlink()
    group.call("save", tmp_path, 2, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002"]
    assert group.call("restore", tmp_path) == 2


def test_a_checkpoint_of_another_model_is_refused(
    group: LocalTrainerGroup, folder: Path, tmp_path: Path
) -> None:
    group.call("load", folder)
    group.call("save", tmp_path / "saved", 1)
    other = make_qwen35(tmp_path / "other", ("full_attention",))
    group.call("load", other)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        group.call("restore", tmp_path / "saved")


def test_a_layout_that_cannot_run_is_refused_with_the_reason() -> None:
    parallel = ParallelConfig(pp=2)
    with pytest.raises(ConfigError, match="pp must be 1: this build has no pipeline schedule"):
        check_layout(parallel, parallel.world_size)
    with pytest.raises(ConfigError, match=r"tp 2 x pp 1 x cp 2 x dp 1 = 4 ranks, but 2 were started"):
        check_layout(ParallelConfig(tp=2, cp=2), 2)


def test_a_rank_that_dies_ends_the_group_with_its_name(folder: Path) -> None:
    with warm_groups(), LocalTrainerGroup(TrainerConfig()) as trainer:
        trainer._processes[0].kill()
        with pytest.raises(InfrastructureError, match="trainer rank 0 died in load"):
            trainer.call("load", folder)
        assert trainer._processes == []
