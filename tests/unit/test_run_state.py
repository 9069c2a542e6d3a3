"""One commit point: what a run state holds comes back, what does not fit is a sentence, a full disk leaves the old one."""

import errno
import os

import pytest

from slime_cua.core.errors import CheckpointError, ConfigError
from slime_cua.launch.rollout_actor import check_same_tasks
from slime_cua.launch.run_state import FILE, Batch, RunState, SftState


def state(version=2):
    batches = [Batch({f"g{n}": 100 * n, f"h{n}": 100 * n + 50}, 2 * n + 3) for n in range(version)]
    return RunState(
        version, {"sampler": [0.1, 1e-300]}, batches, [1, 2], 12.5, {"loss/total": float("nan"), "x": 0.1}
    )


def test_a_state_comes_back_bit_for_bit_with_the_order_of_its_groups(tmp_path):
    state().save(tmp_path)
    again = RunState.load(tmp_path)
    assert repr(again) == repr(state())
    assert [list(batch.groups) for batch in again.batches] == [["g0", "h0"], ["g1", "h1"]]
    assert RunState.load(tmp_path / "nowhere") is None


def test_a_state_that_lists_other_steps_than_it_counts_is_refused():
    with pytest.raises(CheckpointError, match="a run state of version 3 lists 0 steps"):
        RunState(version=3)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 0}', '{"format": 1, "version": 0, "new": 1}'])
def test_what_is_no_state_is_named(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"state\.json is no run state of this slime_cua: "):
        RunState.load(tmp_path)


def test_a_run_of_the_time_before_run_states_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_000010")
    with pytest.raises(CheckpointError, match=r"written by an older slime_cua, .*: start a new run_dir"):
        RunState.load(tmp_path)


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_disk_that_fills_while_the_state_is_written_leaves_the_old_one(tmp_path, monkeypatch, broken):
    state(1).save(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(os, broken, full)
        state(2).save(tmp_path)
    assert RunState.load(tmp_path).version == 1
    assert [path.name for path in tmp_path.iterdir()] == [FILE], "no draft is left"


def test_the_cold_start_begins_at_0_and_goes_on_where_it_was_saved(tmp_path):
    assert SftState.load(tmp_path) is None
    SftState(50, 3.25).save(tmp_path)
    assert SftState.load(tmp_path) == SftState(50, 3.25)
    (tmp_path / "sft_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no state of a cold start"):
        SftState.load(tmp_path)


def test_other_tasks_than_before_are_refused_with_the_difference():
    check_same_tasks(["a", "b"], ["b", "a"])
    with pytest.raises(
        ConfigError, match=r"other tasks .* \(1 gone, e\.g\. b; 2 new, e\.g\. c\): bring them back"
    ):
        check_same_tasks(["a", "b"], ["a", "d", "c"])
