"""What does not fit low-rank adapters is refused by name before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from slime_cua.config.base import load
from slime_cua.config.run import RunConfig
from slime_cua.config.trainer import LoraConfig, TrainerConfig
from slime_cua.core.errors import CheckpointError, ConfigError, DamagedCheckpointError
from slime_cua.trainer.folders import MANIFEST, checksum
from slime_cua.trainer.lora import check_lora, check_saved, saved_adapters

QKV, FC1 = "decoder.layers.0.self_attention.linear_qkv", "decoder.layers.0.mlp.linear_fc1"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def checkpoint(folder: Path, names: tuple[str, ...], rank: int = 4) -> Path:
    """A whole step folder whose layers `names` have adapters."""
    state: dict[str, Any] = {"embedding.weight": torch.zeros(3, 8)}
    for name in names:
        state[f"{name}.lora_A.default.weight"] = torch.zeros(rank, 8)
        state[f"{name}.lora_B.default.weight"] = torch.zeros(6, rank)
    dcp.save(state, checkpoint_id=str(folder / "step_00000007"))
    files = {path.name: path for path in (folder / "step_00000007").iterdir()}
    manifest = {
        "step": 7,
        "files": {name: path.stat().st_size for name, path in files.items()},
        "crc32": {name: checksum(path) for name, path in files.items()},
    }
    (folder / "step_00000007" / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_rank_and_targets_are_read_from_the_checkpoints_list_of_tensors(tmp_path: Path) -> None:
    assert saved_adapters(checkpoint(tmp_path / "both", (QKV, FC1))) == (4, ("attention", "feed_forward"))
    assert saved_adapters(checkpoint(tmp_path / "one", (FC1,), rank=2)) == (2, ("feed_forward",))
    assert saved_adapters(checkpoint(tmp_path / "none", ())) == (0, ())


@pytest.mark.parametrize(
    ("names", "section", "sentence"),
    [
        (
            (QKV, FC1),
            LoraConfig(),
            "adapters of rank 4 on attention, feed_forward.* no adapters .* as the run",
        ),
        ((QKV, FC1), LoraConfig(rank=8), "of rank 4 on .* asks for rank 8 on attention, feed_forward"),
        (
            (QKV,),
            LoraConfig(rank=4),
            "of rank 4 on attention, trainer.lora asks for rank 4 on attention, feed",
        ),
        ((), LoraConfig(rank=4), "whole weights and no adapters.*leave trainer.lora out.*convert to-hf"),
    ],
)
def test_a_checkpoint_with_other_adapters_is_refused_with_both_and_the_way_out(
    tmp_path: Path, names: tuple[str, ...], section: LoraConfig, sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        check_saved(checkpoint(tmp_path, names), section)


def test_a_checkpoint_with_the_same_adapters_passes(tmp_path: Path) -> None:
    check_saved(checkpoint(tmp_path / "both", (QKV, FC1)), LoraConfig(rank=4))
    check_saved(checkpoint(tmp_path / "none", ()), LoraConfig())


def test_a_damaged_list_of_tensors_is_told_as_damage(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, (QKV,)) / "step_00000007" / ".metadata"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata was changed or damaged"):
        check_saved(tmp_path, LoraConfig(rank=4))


def test_a_vision_tower_to_be_trained_beside_adapters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.freeze_vision must be true with trainer\.lora"):
        check_lora(TrainerConfig(lora=LoraConfig(rank=4), freeze_vision=False), num_experts=0)
    check_lora(TrainerConfig(freeze_vision=False), num_experts=0)


def test_adapters_unmerged_to_the_engines_are_no_setting() -> None:
    with pytest.raises(ConfigError, match=r"unknown key trainer\.lora\.sync"):
        load(RunConfig, None, ["trainer.lora.rank=8", "trainer.lora.sync=adapter"])


def test_an_unknown_dtype_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.dtype = .?fp8.?: .*'fp32' or 'bf16'"):
        load(RunConfig, None, ["trainer.dtype=fp8"])
