"""Which publisher a config gives, from the loop to trainer rank 0, and what it must not be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_cua.config.base import validate
from slime_cua.config.rollout import PublishConfig
from slime_cua.config.run import RunConfig
from slime_cua.config.trainer import TrainerConfig
from slime_cua.core.errors import ConfigError
from slime_cua.launch.session import Session
from slime_cua.launch.trainer_group import TrainerActor
from slime_cua.trainer.publish_ways import PublishPlan, make_publisher
from slime_cua.trainer.publisher import BroadcastPublisher, DiskPublisher, IpcPublisher


def plan_of(way: str, folder: Path, *, use_gpu: bool = False) -> PublishPlan:
    return PublishPlan(PublishConfig(way=way), use_gpu, engine_tp=1, folder=folder)


def config_of(**rollout: Any) -> RunConfig:
    return validate(RunConfig, {"rollout": rollout}, "test")


@pytest.mark.parametrize(
    ("way", "kind"), [("broadcast", BroadcastPublisher), ("ipc", IpcPublisher), ("disk", DiskPublisher)]
)
def test_each_way_has_its_publisher(way: str, kind: type, tmp_path: Path) -> None:
    assert type(make_publisher(plan_of(way, tmp_path, use_gpu=True), "127.0.0.1", 5.0)) is kind


def test_broadcast_is_the_default() -> None:
    assert config_of().rollout.publish.way == "broadcast"


def test_trainer_rank_0_publishes_the_way_that_the_plan_names(tmp_path: Path) -> None:
    """No engine: what the way leaves behind tells which one it was."""

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)

    actor: Any = object.__new__(TrainerActor)
    actor._rank, actor._publisher, actor._address = 0, None, "127.0.0.1"
    actor._config, actor._trainer = TrainerConfig(), SimpleNamespace(named_hf_tensors=tensors)
    report = actor.publish(5, [], plan_of("disk", tmp_path / "weights"))
    assert (
        report.folder == tmp_path / "weights" / "v5" and (report.folder / "model-00000.safetensors").exists()
    )


@pytest.mark.parametrize(
    ("way", "num_gpus", "share"), [("broadcast", 2, 1.0), ("disk", 2, 1.0), ("ipc", 1, 0.5)]
)
def test_only_mapped_weights_make_trainer_and_engine_share_a_gpu(
    way: str, num_gpus: int, share: float, tmp_path: Path
) -> None:
    session = Session(config_of(publish={"way": way}, engine={"kind": "sglang"}))
    session.use_gpu, session.run = True, SimpleNamespace(path=tmp_path)  # type: ignore[assignment]
    assert session.publish_plan == PublishPlan(
        PublishConfig(way=way), use_gpu=True, engine_tp=1, folder=tmp_path / "weights"
    )
    assert session.num_gpus == num_gpus and session.publish_plan.gpu_share == share


@pytest.mark.parametrize(
    ("rollout", "trainer", "words"),
    [
        ({"engine": {"kind": "embedded"}}, {}, "needs rollout.engine.kind = sglang, not embedded"),
        ({"engine": {"kind": "external", "urls": ["http://h:1"]}}, {}, "not external"),
        ({"engine": {"num_engines": 2}}, {}, r"not 1 ranks and 2 engine\(s\) of tp 1; use broadcast"),
        ({"engine": {"tp": 2}}, {}, "of tp 2"),
        ({}, {"parallel": {"dp": 2}}, "not 2 ranks"),
    ],
)
def test_mapped_weights_without_one_shared_gpu_are_refused_by_name(
    rollout: dict[str, Any], trainer: dict[str, Any], words: str
) -> None:
    tree = {"rollout": {**rollout, "publish": {"way": "ipc"}}, "trainer": trainer}
    with pytest.raises(ConfigError, match=words):
        validate(RunConfig, tree, "test")


def test_mapped_weights_without_a_gpu_or_with_memory_that_cannot_be_mapped_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        make_publisher(plan_of("ipc", tmp_path), "127.0.0.1", 5.0)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,garbage_collection_threshold:0.8")
    with pytest.raises(ConfigError, match="expandable_segments"):
        make_publisher(plan_of("ipc", tmp_path, use_gpu=True), "127.0.0.1", 5.0)


def test_a_way_that_does_not_exist_is_told_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"rollout.publish.way = 'nccl'.*'broadcast', 'ipc' or 'disk'"):
        config_of(publish={"way": "nccl"})
