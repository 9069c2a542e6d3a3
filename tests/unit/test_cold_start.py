"""A cold start that is interrupted goes on from its last checkpoint: each batch counts once, in the same order."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_cua.config.base import load
from slime_cua.config.run import FaultConfig, RunConfig
from slime_cua.core.errors import CheckpointError, DamagedCheckpointError
from slime_cua.core.types import Segment, TrainSample
from slime_cua.launch.cold_start import _SftLoop
from slime_cua.launch.faults import FaultLog
from slime_cua.launch.run_dir import RunDir
from slime_cua.launch.run_state import SftState
from slime_cua.launch.steady_trainer import SteadyTrainer
from slime_cua.launch.trainer_group import TrainerLost
from slime_cua.trainer.folders import MANIFEST, step_folder

NUM_STEPS = 11


def sample(number):
    segment = Segment(
        segment_id=f"s{number}",
        episode_id="e",
        group_id="g",
        task_id="t",
        token_ids=(1,),
        is_trained=(True,),
        logp=(0.0,),
        versions=(-1,),
        step_of_token=(0,),
        step_types=("gui",),
    )
    return TrainSample(segment=segment)


class Weights:
    """A trainer whose weights are the batches that made them."""

    def __init__(self, script):
        self.trained, self._script = [], script

    def call(self, method, *arguments, **named):
        error = self._script.pop(0) if self._script else None
        if error is not None and method == (
            "restore" if isinstance(error, CheckpointError) else "train_step"
        ):
            raise error
        return getattr(self, method)(*arguments, **named)

    def train_step(self, batch, images, loss):
        self.trained.append([one.segment.segment_id for one in batch])
        return {"sft/loss": 1.0}

    def save(self, folder, step):
        path = step_folder(folder, step)
        path.mkdir(parents=True)
        (path / "weights").write_text(json.dumps(self.trained))
        size = (path / "weights").stat().st_size
        (path / MANIFEST).write_text(json.dumps({"step": step, "files": {"weights": size}}))

    def restore(self, folder):
        self.trained = json.loads((Path(folder) / "weights").read_text())

    def export_hf(self, target):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(json.dumps(self.trained))

    def close(self):
        self.trained = None


def live(folder, *scripts):
    """One start of the command: the rows that it logs; `scripts` say where trainers are lost or the driver dies."""
    config = load(
        RunConfig, None, [f"run_dir={folder}", "sft.num_epochs=2", "sft.batch_size=4", "sft.save_every=3"]
    )
    rows, scripts = [], list(scripts)
    with RunDir(config) as run:
        session = SimpleNamespace(
            config=config,
            run=run,
            images=None,
            console=SimpleNamespace(say=lambda text: None, progress=lambda text: None),
            logger=SimpleNamespace(log=lambda values, step, axis: rows.append(step)),
        )
        faults = FaultLog(FaultConfig(max_failures=99), run.logs)
        trainer = SteadyTrainer(
            lambda: Weights(scripts.pop(0) if scripts else []), faults, lambda text: None, run.logs
        )
        _SftLoop(session, trainer, [sample(n) for n in range(22)]).run()
    return rows


@pytest.fixture
def whole(tmp_path):
    assert live(tmp_path / "whole") == list(range(NUM_STEPS))
    return json.loads((tmp_path / "whole/hf/sft").read_text())


@pytest.mark.parametrize("num_calls", range(14))
def test_killed_at_any_call_it_goes_on_from_its_checkpoint_with_the_same_batches(tmp_path, whole, num_calls):
    folder = tmp_path / "run"
    try:
        live(folder, [None] * num_calls + [KeyboardInterrupt()])
    except KeyboardInterrupt:
        state = SftState.load(folder)
        assert state.step % 3 == 0 and (state.step == 0) == (num_calls < 4)
        rows = live(folder)
        assert rows == list(range(state.step, NUM_STEPS)), "steps before the checkpoint are not done again"
    assert json.loads((folder / "hf/sft").read_text()) == whole
    kept = [path.name for path in (folder / "checkpoints/sft").iterdir()]
    assert kept == ["step_00000009"]


@pytest.mark.parametrize("num_calls", [1, 3, 5, 7, 9])
def test_trainers_lost_on_the_way_and_on_the_way_back_change_nothing(tmp_path, whole, num_calls):
    lost = TrainerLost("rank 0 died")
    rows = live(tmp_path / "run", [None] * num_calls + [lost], [None, lost], [lost, lost])
    assert json.loads((tmp_path / "run/hf/sft").read_text()) == whole
    assert rows == list(range(NUM_STEPS)), "what is trained again is not logged again"


def test_with_a_damaged_checkpoint_it_is_trained_from_the_beginning_and_with_that_of_another_model_not_at_all(
    tmp_path, whole
):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        live(folder, [None] * 6 + [KeyboardInterrupt()])
    with pytest.raises(CheckpointError, match="another model"):
        live(folder, [CheckpointError("of another model")])
    rows = live(folder, [DamagedCheckpointError("a byte was changed")])
    assert json.loads((folder / "hf/sft").read_text()) == whole
    assert rows == list(range(3, NUM_STEPS)), "what is trained again is not logged again"
