"""Run directory: one run at a time, no silent config change, half-written checkpoints do not exist."""

import json

import pytest

from slime_cua.config.base import load
from slime_cua.config.run import RunConfig
from slime_cua.core.errors import ConfigError, PreflightError
from slime_cua.launch.run_dir import MAY_CHANGE, RunDir, _leaves


def config_for(folder, *overrides):
    return load(RunConfig, None, [f"run_dir={folder}", *overrides])


def test_two_runs_in_one_directory_are_refused(tmp_path):
    with RunDir(config_for(tmp_path)):
        with pytest.raises(PreflightError, match="another run is at work"):
            RunDir(config_for(tmp_path)).__enter__()
    with RunDir(config_for(tmp_path)):
        pass


def test_a_changed_config_is_shown_key_by_key_and_refused_but_what_is_listed_may_change(tmp_path):
    with RunDir(config_for(tmp_path)):
        pass
    free = [
        "num_steps=7",
        "sandbox.num_desktops=9",
        "rollout.engine.num_engines=3",
        "trainer.timeout_s=5",
        "faults.max_failures=2",
    ]
    with RunDir(config_for(tmp_path, *free)):
        pass
    with pytest.raises(ConfigError) as caught:
        RunDir(
            config_for(tmp_path, *free, "seed=5", "rollout.engine.dtype=fp32", "trainer.optimizer.lr=0.5")
        ).__enter__()
    lines = str(caught.value).splitlines()
    assert lines[1:4] == [
        "  rollout.engine.dtype: 'bf16' -> 'fp32'",
        "  seed: 0 -> 5",
        "  trainer.optimizer.lr: 1e-06 -> 0.5",
    ]
    assert lines[4].startswith("(a run may go on with other values of: num_steps, ")
    with RunDir(config_for(tmp_path, *free)):
        pass


def test_every_key_that_may_change_exists():
    known = _leaves(RunConfig().model_dump(mode="json"))
    for key in MAY_CHANGE:
        assert any(name == key or name.startswith(f"{key}.") for name in known), key


def whole(path):
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"x" * 10)
    (path / "manifest.json").write_text(json.dumps({"step": 1, "files": {"weights": 10}}))


def test_checkpoints_that_the_state_does_not_name_go_and_damaged_ones_are_not_whole(tmp_path):
    with RunDir(config_for(tmp_path)) as run:
        for step in (100, 110, 120, 130):
            whole(run.checkpoint(step))
        whole(run.checkpoints / "sft" / "step_00000005")
        (run.checkpoints / ".unfinished-step_00000140").mkdir()
        run.remove_checkpoints(but=[110, 120])
        assert sorted(path.name for path in run.checkpoints.iterdir()) == [
            "sft",
            "step_00000110",
            "step_00000120",
        ]
        assert run.is_whole(110) and not run.is_whole(130)
        (run.checkpoint(120) / "weights").write_bytes(b"x" * 9)
        assert not run.is_whole(120)


def test_a_phase_that_goes_on_is_scored_anew_and_its_old_episodes_stay(tmp_path):
    with RunDir(config_for(tmp_path)) as run:
        run.finish_phase("sft", {})
        run.finish_phase("rl", {"num_steps": 5.0})
        run.finish_phase("eval_rl", {"eval/success": 0.5})
        run.episodes("eval_rl").parent.mkdir()
        run.episodes("eval_rl").write_text("scored\n")
        run.reopen_phase("rl", "step_5")
        assert [run.phase_result(name) for name in ("sft", "rl", "eval_rl")] == [{}, None, None]
        assert not run.episodes("eval_rl").exists()
        assert run.episodes("eval_rl_step_5").read_text() == "scored\n"
        run.reopen_phase("rl", "step_5")


def test_phase_marks_survive(tmp_path):
    with RunDir(config_for(tmp_path)) as run:
        assert run.phase_result("sft") is None
        run.finish_phase("sft", {"loss": 1.0})
    with RunDir(config_for(tmp_path)) as run:
        assert run.phase_result("sft") == {"loss": 1.0}
