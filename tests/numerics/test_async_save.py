"""A checkpoint written in a thread is that of the moment it was asked for, on two ranks, and comes back under another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_cua.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slime_cua.core.errors import CheckpointError
from slime_cua.trainer.folders import MANIFEST, checksum, is_whole
from slime_cua.trainer.group import LocalTrainerGroup
from tests.numerics.tiny_models import HYBRID, make_qwen35
from tests.numerics.trainer_cases import make_samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def config_of(**parallel: Any) -> TrainerConfig:
    return TrainerConfig(
        dtype="fp32",
        parallel=ParallelConfig(**parallel),
        max_tokens_per_rank=512,
        optimizer=OptimizerConfig(lr=1e-3),
    )


def test_training_goes_on_while_a_checkpoint_is_written_and_the_checkpoint_is_of_before(
    tmp_path: Path,
) -> None:
    folder = make_qwen35(tmp_path / "model", HYBRID, is_tied=False)
    samples, store = make_samples()
    with LocalTrainerGroup(config_of(tp=2), start_timeout_s=600) as trainer:
        trainer.call("load", folder)
        trainer.call("train_step", samples, store, "sft")
        before = trainer.call("logprobs", samples, store)
        path = trainer.call("save", tmp_path / "saved", 1, is_async=True)
        later = [trainer.call("train_step", samples, store, "sft")["sft/loss"] for _ in range(2)]
        assert trainer.call("finish_save") == path
        assert trainer.call("finish_save") is None
        assert is_whole(path)
        manifest = json.loads((path / MANIFEST).read_text())
        assert set(manifest["crc32"]) == set(manifest["files"])
        assert all(checksum(path / name) == value for name, value in manifest["crc32"].items())
        # Not writable any more: a file stands where the folder should be.
        (tmp_path / "blocked").write_text("")
        with pytest.raises(CheckpointError, match="was not written, what was there is kept"):
            trainer.call("save", tmp_path / "blocked", 2, is_async=True)
    with LocalTrainerGroup(config_of(tp=1), start_timeout_s=600) as trainer:
        trainer.call("load", folder)
        assert trainer.call("restore", tmp_path / "saved") == 1
        found = trainer.call("logprobs", samples, store)
        again = [trainer.call("train_step", samples, store, "sft")["sft/loss"] for _ in range(2)]
        data = next(p for p in path.iterdir() if p.suffix == ".distcp")
        bytes_ = bytearray(data.read_bytes())
        bytes_[len(bytes_) // 2] ^= 1
        data.write_bytes(bytes_)
        with pytest.raises(CheckpointError, match=rf"{data.name} was changed or damaged"):
            trainer.call("restore", tmp_path / "saved")
    for got, wanted in zip(found, before, strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), atol=1e-4, rtol=0)
    assert again == pytest.approx(later, abs=1e-4)
