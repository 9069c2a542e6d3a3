"""Run directory: one run at a time, no silent config change, half-written checkpoints do not exist."""

import pytest

from slime_cua.config.base import load
from slime_cua.config.run import RunConfig
from slime_cua.core.errors import ConfigError, PreflightError
from slime_cua.launch.run_dir import RunDir


def config_for(folder, *overrides):
    return load(RunConfig, None, [f"run_dir={folder}", *overrides])


def test_two_runs_in_one_directory_are_refused(tmp_path):
    with RunDir(config_for(tmp_path)):
        with pytest.raises(PreflightError, match="another run is at work"):
            RunDir(config_for(tmp_path)).__enter__()
    with RunDir(config_for(tmp_path)):
        pass


def test_a_changed_config_is_shown_and_refused_but_the_length_may_change(tmp_path):
    with RunDir(config_for(tmp_path)):
        pass
    with RunDir(config_for(tmp_path, "num_steps=7")):
        pass
    with pytest.raises(ConfigError, match="seed: 0 -> 5"):
        RunDir(config_for(tmp_path, "seed=5")).__enter__()


def test_only_listed_checkpoints_count_and_old_ones_go_last(tmp_path):
    with RunDir(config_for(tmp_path)) as run:
        assert run.latest_checkpoint() is None
        for step in (100, 110, 120):
            run.checkpoint(step).mkdir(parents=True)
            run.publish_checkpoint(step, {"step": step})
        (run.checkpoint(130) / "trainer").mkdir(parents=True)  # killed while writing
        assert run.latest_checkpoint() == run.checkpoint(120)
        assert sorted(p.name for p in run.checkpoints.glob("step_*")) == [
            "step_000110",
            "step_000120",
            "step_000130",
        ]


def test_phase_marks_survive(tmp_path):
    with RunDir(config_for(tmp_path)) as run:
        assert run.phase_result("sft") is None
        run.finish_phase("sft", {"loss": 1.0})
    with RunDir(config_for(tmp_path)) as run:
        assert run.phase_result("sft") == {"loss": 1.0}
