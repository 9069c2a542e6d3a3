"""Moments that wait in the host's memory change nothing, on a CPU and, where there is one, on a GPU, where they free it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime_cua.config.trainer import OptimizerConfig, TrainerConfig
from slime_cua.trainer.optimizer import MOMENTS
from slime_cua.trainer.rank import TrainerRank
from tests.numerics.tiny_models import FULL, make_qwen35
from tests.numerics.trainer_cases import make_samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def moments(trainer: TrainerRank) -> list[torch.Tensor]:
    megatron = trainer.optimizer.megatron
    parts = getattr(megatron, "chained_optimizers", [megatron])
    return [s[name] for part in parts for s in part.optimizer.state.values() for name in MOMENTS if name in s]


def run(folder: Path, saved: Path, is_offloaded: bool) -> dict[str, Any]:
    samples, store = make_samples()
    config = TrainerConfig(
        dtype="fp32",
        max_tokens_per_rank=512,
        optimizer=OptimizerConfig(lr=1e-3),
        offload_optimizer=is_offloaded,
    )
    trainer = TrainerRank(config)
    try:
        trainer.load(folder)
        losses = [trainer.train_step(samples, store, "sft")["sft/loss"] for _ in range(2)]
        devices = {moment.device.type for moment in moments(trainer)}
        trainer.save(saved, 2)
        losses += [trainer.train_step(samples, store, "sft")["sft/loss"] for _ in range(2)]
        trainer.load(folder)
        trainer.restore(saved)
        again = [trainer.train_step(samples, store, "sft")["sft/loss"] for _ in range(2)]
        return {"losses": losses, "again": again, "devices": devices, "count": len(moments(trainer))}
    finally:
        trainer.close()


def test_training_and_resuming_with_moments_on_the_host_are_the_same(tmp_path: Path) -> None:
    folder = make_qwen35(tmp_path / "model", FULL)
    plain, offloaded = (run(folder, tmp_path / str(flag), flag) for flag in (False, True))
    assert offloaded["losses"] == plain["losses"]
    assert offloaded["again"] == pytest.approx(plain["losses"][2:], abs=1e-6)
    assert offloaded["count"] == plain["count"] > 0
    assert offloaded["devices"] == {"cpu"}
    assert plain["devices"] == {"cuda" if torch.cuda.is_available() else "cpu"}


def test_moments_move_and_nothing_else_does(tmp_path: Path) -> None:
    """A device without memory in place of the other one, so that this is seen on a CPU, too."""
    samples, store = make_samples()
    trainer = TrainerRank(TrainerConfig(dtype="fp32", max_tokens_per_rank=512))
    try:
        trainer.load(make_qwen35(tmp_path / "model", FULL))
        trainer.train_step(samples, store, "sft")
        here = trainer.layout.device.type
        assert {moment.device.type for moment in moments(trainer)} == {here}
        trainer.optimizer.move_moments(torch.device("meta"))
        assert {moment.device.type for moment in moments(trainer)} == {"meta"}
        assert {p.device.type for p in trainer.model.module.parameters()} == {here}
        megatron = trainer.optimizer.megatron
        for part in getattr(megatron, "chained_optimizers", [megatron]):
            for parameter, state in part.optimizer.state.items():
                assert parameter.device.type == here
                assert all(x.device.type != "meta" for name, x in state.items() if name not in MOMENTS)
    finally:
        trainer.close()
