"""Checkpoints that are written while the loop goes on: which the state names, what a late failure, a lost trainer or a kill leaves.

Real loop, run directory, run state and steady trainer; the ranks are a double that writes checkpoint folders when told to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_cua.config.rollout import CanaryConfig, RolloutConfig
from slime_cua.config.run import FaultConfig, RunConfig
from slime_cua.core.errors import CheckpointError
from slime_cua.launch.console import Console
from slime_cua.launch.faults import FaultLog
from slime_cua.launch.loop import Loop
from slime_cua.launch.run_dir import RunDir
from slime_cua.launch.run_state import Batch, RunState
from slime_cua.launch.steady_trainer import SteadyTrainer
from slime_cua.launch.trainer_group import TrainerLost
from slime_cua.trainer.folders import MANIFEST, publish, step_folder, whole_steps


class Ranks:
    """One trainer: `step` is what its weights stand for; an asynchronous save is on disk when `finish_save` has returned."""

    def __init__(self) -> None:
        self.step = 0
        self.pending: Path | None = None
        self.is_lost = self.is_disk_full = False

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        if self.is_lost:
            raise TrainerLost("killed")
        return getattr(self, method)(*arguments, **named)

    def save(self, folder: str, step: int, is_async: bool) -> Path:
        assert self.pending is None, "one write at a time"
        assert step == self.step, "a checkpoint is of the weights that are there"
        self.pending = step_folder(folder, step)
        if not is_async:
            self.finish_save()
        return step_folder(folder, step)

    def finish_save(self) -> Path | None:
        path, self.pending = self.pending, None
        if path is not None:
            if self.is_disk_full:
                raise CheckpointError(
                    f"checkpoint {path} was not written, what was there is kept; rank 0: full"
                )
            write(path)
        return path

    def restore(self, path: str) -> int:
        self.step = int(json.loads((Path(path) / MANIFEST).read_text())["step"])
        return self.step

    def train_step(
        self, samples: Sequence[Any], images: Any, *, policy_version: int, **_: Any
    ) -> dict[str, float]:
        assert policy_version == self.step, "steps are trained in order"
        self.step += 1
        return {}

    def publish(self, version: int, urls: Sequence[str], plan: Any) -> Any:
        assert version == self.step
        return SimpleNamespace(engines=tuple(urls), folder=None, seconds={"paused": 0.0})

    def close(self) -> None:
        self.is_lost = True


def write(path: Path) -> None:
    draft = path.with_name(f"draft-{path.name}")
    draft.mkdir(parents=True)
    (draft / MANIFEST).write_text(json.dumps({"files": {}, "step": int(path.name[5:])}))
    publish(draft, path)


class Driver:
    """One start of the command, up to where the loop would go on."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.ranks = run, []
        config = run.config
        fleet: Any = SimpleNamespace(
            serving=lambda: ("engine",), reachable=lambda: ("engine",), published=lambda *_: None
        )
        session: Any = SimpleNamespace(
            config=config,
            run=run,
            model=Path("models/tiny_base"),
            console=Console(),
            images=None,
            publish_plan=None,
            rollout=lambda *_: {},
            set_engines=lambda *_: None,
            on_rollout_restart=lambda *_: None,
            tasks=SimpleNamespace(train=[]),
        )
        trainer = SteadyTrainer(self._start, FaultLog(config.faults, run.logs), session.console.say, run.logs)
        self.loop = Loop(session, trainer, fleet)
        self.loop.resume_or_start()

    def _start(self) -> Ranks:
        self.ranks.append(Ranks())
        return self.ranks[-1]

    def step(self) -> None:
        """A step over no groups, and its commit."""
        self.loop.train([])
        self.loop._write(version=self.loop.version + 1, batches=[*self.loop.state.batches, Batch({}, 0)])
        self.loop.publish()
        self.loop.save_if_due()

    def named(self) -> list[int]:
        """Checkpoints that count, by the state on disk."""
        state = RunState.load(self.run.path)
        assert state is not None
        return state.checkpoints

    def on_disk(self) -> set[int]:
        return set(whole_steps(self.run.checkpoints))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    config = RunConfig(
        run_dir=str(tmp_path / "run"),
        num_steps=20,
        save_every=3,
        rollout=RolloutConfig(canary=CanaryConfig(every=0)),
        faults=FaultConfig(max_failures=9),
    )
    with RunDir(config) as opened:
        yield opened


def test_a_checkpoint_is_named_when_it_is_whole_and_the_last_two_are_kept(run: RunDir) -> None:
    driver, named = Driver(run), []
    for _ in range(10):
        driver.step()
        named.append(driver.named())
        assert set(named[-1]) <= driver.on_disk()
    assert named == [[], [], [], [3], [3], [3], [3, 6], [3, 6], [3, 6], [6, 9]]
    assert driver.on_disk() == {6, 9}


def test_with_a_checkpoint_each_step_the_next_one_begins_when_the_last_one_is_whole(run: RunDir) -> None:
    run.config = run.config.model_copy(update={"save_every": 1})
    driver, named = Driver(run), []
    for _ in range(4):
        driver.step()
        named.append(driver.named())
    assert named == [[], [1], [1, 2], [2, 3]]


def test_a_write_that_failed_is_said_at_the_next_step_and_a_resume_trains_from_the_one_before(
    run: RunDir,
) -> None:
    driver = Driver(run)
    for _ in range(6):
        driver.step()
    driver.ranks[-1].is_disk_full = True
    with pytest.raises(CheckpointError, match="step_00000006 was not written, what was there is kept"):
        driver.step()
    assert driver.named() == [3] and driver.on_disk() == {3} and driver.loop.version == 7
    again = Driver(run)
    assert again.ranks[-1].step == again.loop.version == 7
    again.step()
    again.step()
    again.step()
    assert again.named() == [3, 9]


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_checkpoint_lost_with_its_ranks_is_replaced_by_one_of_now_and_what_they_left_goes(
    run: RunDir, is_on_disk: bool
) -> None:
    driver = Driver(run)
    for _ in range(6):
        driver.step()
    driver.ranks[-1].is_lost = True
    if is_on_disk:
        write(step_folder(run.checkpoints, 6))
    driver.step()
    assert len(driver.ranks) == 2 and driver.ranks[-1].step == driver.loop.version == 7
    assert driver.named() == [3, 7] and driver.on_disk() == {3, 7}


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_killed_before_the_state_names_it_a_checkpoint_counts_for_nothing(
    run: RunDir, is_on_disk: bool
) -> None:
    driver = Driver(run)
    for _ in range(7):
        driver.step()
    driver.loop.train([])
    if is_on_disk:
        write(step_folder(run.checkpoints, 9))
    (run.checkpoints / ".unfinished-step_00000012").mkdir()
    again = Driver(run)
    assert again.named() == [3, 6] and again.on_disk() == {3, 6}
    assert not list(run.checkpoints.glob(".unfinished-*"))
    assert again.ranks[-1].step == again.loop.version == 7


def test_a_run_that_ends_while_one_is_written_names_that_one_and_its_last(run: RunDir) -> None:
    driver = Driver(run)
    for _ in range(6):
        driver.step()
    driver.step()
    driver.ranks[-1].export_hf = lambda target: None  # type: ignore[attr-defined]
    driver.loop.finish()
    assert driver.named() == [6, 7] and driver.on_disk() == {6, 7}
