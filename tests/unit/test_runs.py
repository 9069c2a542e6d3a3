"""Runs listed, shown and cleaned up: what a run needs stays, a run at work is left alone."""

import json
import os
import time

import pytest

from slime_cua.cli import main as cli
from slime_cua.config.base import load
from slime_cua.config.run import RunConfig
from slime_cua.core.errors import CheckpointError, ConfigError, PreflightError
from slime_cua.core.types import Episode, EpisodeGroup, ImageRef, Turn
from slime_cua.data.episodes import EpisodeStore, OpenGroups
from slime_cua.data.images import ImageStore
from slime_cua.launch.image_needs import needed_images, reference_counts
from slime_cua.launch.run_dir import RunDir
from slime_cua.launch.run_state import Batch, RunState
from slime_cua.launch.runs import ago, find_runs, human, is_running, listing, show, summarise
from slime_cua.launch.runs_gc import collect, plan
from slime_cua.trainer.folders import MANIFEST, UNFINISHED, reading, set_score, step_folder, whole_steps
from tests.unit.test_data_stores import png


def config_for(folder, *overrides):
    return load(RunConfig, None, [f"run_dir={folder}", "num_steps=30", *overrides])


def episode(group_id, *images):
    turns = [
        Turn(
            index=n,
            starts_segment=n == 0,
            context_ids=(1,),
            context_images=(image,),
            response_ids=(2,),
            response_logp=(0.0,),
            response_versions=(0,),
        )
        for n, image in enumerate(images)
    ]
    return Episode(
        episode_id=f"{group_id}-e0",
        group_id=group_id,
        task_id="t",
        turns=tuple(turns),
        reward=1.0,
        stop_reason="terminated",
    )


class Fixture:
    """A run of three steps: a checkpoint at 2, g0 and g1 trained before it, g2 after it, g3 finished, g4 unfinished.

    Each has an image of its own; `shared` is in g0 and g3; `loose` is named by nothing.
    """

    def __init__(self, folder):
        self.path = folder
        with RunDir(config_for(folder)) as run:
            run.finish_phase("sft", {"seconds": 1.0})
            run.finish_phase("eval_sft", {"eval/success": 0.25, "num_valid": 4})
        self.images = ImageStore(folder / "images")
        names = ("shared", "g0", "g1", "g2", "g3", "g4", "late", "loose", "demo", "eval")
        self.refs = {name: self.images.put(png(8, 8, name.encode())) for name in names}
        places, store = {}, EpisodeStore(folder / "episodes" / "rl.jsonl")
        for name in ("g0", "g1", "g2", "g3"):
            extra = ("shared",) if name in ("g0", "g3") else ()
            store.append(self.group(name, name, *extra))
            places[name] = store.last_start
        num_bytes = store.num_bytes
        store.append(self.group("late", "late"))
        OpenGroups(folder / "episodes" / "rl_open").append(episode("g4", self.refs["g4"]))
        EpisodeStore(folder / "episodes" / "demonstrations.jsonl").append(self.group("demo", "demo"))
        EpisodeStore(folder / "episodes" / "eval_sft.jsonl").append(self.group("eval", "eval"))
        self.state = RunState(
            version=3,
            rollout={"finished": {"g3": places["g3"]}, "store_bytes": num_bytes},
            batches=[Batch({name: places[name]}, 1) for name in ("g0", "g1", "g2")],
            checkpoints=[2],
        )
        self.state.save(folder)
        for step in (1, 2):
            self.checkpoint(step)

    def group(self, group_id, *names):
        one = episode(group_id, *(self.refs[name] for name in names))
        return EpisodeGroup(group_id=group_id, task_id="t", episodes=(one,), admitted_version=0)

    def checkpoint(self, step):
        folder = step_folder(self.path / "checkpoints", step)
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text('{"files": {}}')
        return folder

    def names(self, hashes):
        return {name for name, ref in self.refs.items() if ref.sha256 in hashes}


def test_references_are_counted_and_needed_is_what_training_may_still_read(tmp_path):
    run = Fixture(tmp_path)
    counts = reference_counts(tmp_path)
    assert counts[run.refs["shared"].sha256] == 2 and counts[run.refs["g1"].sha256] == 1
    assert run.names(counts) == set(run.refs) - {"loose"}
    assert run.names(needed_images(tmp_path)) == {"g2", "g3", "shared", "g4", "late"}


def test_before_rl_the_demonstrations_are_needed_and_after_it_nothing_is(tmp_path):
    run = Fixture(tmp_path)
    with RunDir(config_for(tmp_path)) as directory:
        directory.finish_phase("rl", {"num_steps": 3.0})
    assert needed_images(tmp_path) == set()
    (tmp_path / "phases.json").unlink()
    (tmp_path / "state.json").unlink()
    assert run.names(needed_images(tmp_path)) == {"demo", "g0", "g1", "g2", "g3", "shared", "g4", "late"}


def test_a_dry_run_says_what_would_go_and_removes_nothing(tmp_path):
    Fixture(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    text = collect(tmp_path, is_dry=True)
    assert "would remove 1 checkpoint(s) that the run state does not name" in text
    assert "would remove 1 screenshot(s) that no episode names" in text
    assert sorted(tmp_path.rglob("*")) == before


def test_what_nothing_references_goes_and_the_rest_stays(tmp_path):
    run = Fixture(tmp_path)
    (tmp_path / "images" / "ab").mkdir(exist_ok=True)
    draft = tmp_path / "images" / "ab" / ".new-x"
    draft.write_bytes(b"half")
    unfinished = tmp_path / "checkpoints" / f"{UNFINISHED}step_00000003"
    unfinished.mkdir()
    collect(tmp_path, is_dry=False)
    assert {name for name, ref in run.refs.items() if ref in run.images} == set(run.refs) - {"loose"}
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    assert not draft.exists() and not unfinished.exists()
    assert "nothing to remove" in collect(tmp_path, is_dry=False)


def test_consumed_screenshots_go_on_demand_but_those_of_the_report_stay(tmp_path):
    run = Fixture(tmp_path)
    film = {"films": [{"frames": [{"png": f"images/{run.refs['eval'].sha256}.png"}]}]}
    (tmp_path / "report_data.json").write_text(json.dumps(film))
    collect(tmp_path, is_dry=False, with_consumed=True)
    left = {name for name, ref in run.refs.items() if ref in run.images}
    assert left == {"g2", "g3", "shared", "g4", "late", "eval"}


def test_a_checkpoint_that_was_moved_aside_and_not_replaced_stays(tmp_path):
    Fixture(tmp_path)
    folder = step_folder(tmp_path / "checkpoints", 2)
    aside = folder.with_name(f"{UNFINISHED}old-{folder.name}")
    folder.rename(aside)
    collect(tmp_path, is_dry=False)
    assert aside.exists()


def test_a_checkpoint_that_scored_best_or_is_read_right_now_stays_though_no_state_names_it(tmp_path):
    run = Fixture(tmp_path)
    set_score(run.checkpoint(3), 0.5)
    with reading(run.checkpoint(4)):
        collect(tmp_path, is_dry=False)
        assert sorted(whole_steps(tmp_path / "checkpoints")) == [2, 3, 4]
    collect(tmp_path, is_dry=False)
    assert sorted(whole_steps(tmp_path / "checkpoints")) == [2, 3]


def test_a_run_at_work_is_left_alone_and_cannot_start_while_it_is_cleaned(tmp_path):
    run = Fixture(tmp_path)
    with RunDir(config_for(tmp_path)):
        assert is_running(tmp_path) and summarise(tmp_path).status == "running"
        with pytest.raises(PreflightError, match="a run is at work"):
            collect(tmp_path, is_dry=False)
        with pytest.raises(PreflightError, match="a run is at work"):
            collect(tmp_path, is_dry=True)
    assert run.refs["loose"] in run.images
    assert not is_running(tmp_path)
    with RunDir(config_for(tmp_path)):
        pass  # looking did not keep the lock


def test_without_a_readable_state_nothing_goes(tmp_path):
    run = Fixture(tmp_path)
    (tmp_path / "state.json").write_text('{"format": 1, "ver')
    with pytest.raises(CheckpointError, match=r"state\.json is no run state"):
        plan(tmp_path)
    assert run.refs["loose"] in run.images


def test_a_cut_last_line_still_counts_as_a_reference(tmp_path):
    run = Fixture(tmp_path)
    path = tmp_path / "episodes" / "rl.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert run.refs["late"].sha256 in reference_counts(tmp_path)


def test_runs_are_listed_with_status_step_success_size_and_age(tmp_path, capsys):
    Fixture(tmp_path / "a" / "first")
    with RunDir(config_for(tmp_path / "second")):
        pass
    (tmp_path / "no_run").mkdir()
    assert find_runs(tmp_path) == [tmp_path / "a" / "first", tmp_path / "second"]
    old = (tmp_path / "second" / "config.yaml").stat().st_mtime - 3 * 3600
    os.utime(tmp_path / "second" / "config.yaml", (old, old))
    text = listing(tmp_path).splitlines()
    assert text[0].split() == [
        "run",
        "status",
        "step",
        "held-out",
        "success",
        "size",
        "last",
        "sign",
        "of",
        "life",
    ]
    assert "stopped  3/30" in text[1] and "sft 25.0 %" in text[1]
    assert "new      0/30" in text[2] and "3 h ago" in text[2]
    assert cli(["runs", "ls", str(tmp_path)]) == 0
    assert "stopped" in capsys.readouterr().out


def test_show_tells_what_a_run_did(tmp_path):
    Fixture(tmp_path)
    row = {"step": 3, "values": {"reward/mean": 0.5, "lag/max": 1.0}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + '{"cut')
    (tmp_path / "logs" / "faults.jsonl").write_text('{"part": "engine", "what": "died"}\n')
    text = show(tmp_path)
    assert "stopped, step 3 of 30" in text
    assert "eval_sft: success 0.25, num_valid 4" in text
    assert "reward/mean 0.5, lag/max 1" in text
    assert "episodes/rl.jsonl: 5 groups" in text
    assert "images: 10" in text and "9 named by episodes, 5 still needed to train" in text
    assert "checkpoints: step 2" in text
    assert "failure: engine: died" in text


def test_a_finished_run_is_done(tmp_path):
    Fixture(tmp_path)
    (tmp_path / "report.html").write_text("<p>")
    assert summarise(tmp_path).status == "stopped", "RL is not done"
    with RunDir(config_for(tmp_path)) as run:
        run.finish_phase("rl", {"num_steps": 30.0})
    assert summarise(tmp_path).status == "done"


def test_bad_input_is_a_sentence(tmp_path, capsys):
    with pytest.raises(ConfigError, match="there is no such folder"):
        find_runs(tmp_path / "none")
    assert listing(tmp_path) == f"no run below {tmp_path}"
    assert cli(["runs", "show", str(tmp_path)]) == 1
    assert "is no run directory" in capsys.readouterr().err
    assert cli(["runs", "gc", str(tmp_path)]) == 1
    Fixture(tmp_path)
    (tmp_path / "phases.json").write_text("{")
    assert cli(["runs", "show", str(tmp_path)]) == 1
    assert "phases.json is broken" in capsys.readouterr().err


def test_sizes_and_ages_read_well():
    assert [human(n) for n in (0, 1023, 1536, 5 << 30, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]
    assert [ago(s) for s in (-1, 59, 90, 7200, 2 * 86400)] == ["0 s", "59 s", "2 min", "2 h", "2 d"]


def test_an_image_ref_is_found_wherever_an_episode_names_it(tmp_path):
    """References are read by pattern, not by model: an observation's image counts like a context's."""
    path = tmp_path / "episodes" / "x.jsonl"
    path.parent.mkdir()
    ref = ImageRef(sha256="a" * 64, width_px=1, height_px=1)
    path.write_text(f'{{"observation": {{"image": {ref.model_dump_json()}}}}}\n')
    assert reference_counts(tmp_path) == {"a" * 64: 1}


def test_the_rollout_side_keeps_images_of_running_and_of_needed_episodes_when_the_store_is_full(tmp_path):
    """A store of ten images, one consumed for each new one; what runs since `start` and what training needs stays."""
    from slime_cua.launch.rollout_actor import JUST_ENDED_S, RolloutActor

    run = Fixture(tmp_path)
    start, mono = time.time(), time.monotonic()
    actor = RolloutActor.__new__(RolloutActor)  # its constructor takes over the process's output
    actor.run_dir = tmp_path
    actor._running_since = {"g4-e1": (start, mono + 60), "late-e2": (start + 60, mono + 60)}
    needs = actor._needs()
    assert needs.since_s == start - JUST_ENDED_S
    assert run.names(needs.hashes) == {"g2", "g3", "shared", "g4", "late"}
    for name, ref in run.refs.items():
        age_s = 0.0 if name == "loose" else 1000.0  # just taken: its episode is not on record yet
        os.utime(run.images.path(ref), (start - age_s, start - age_s))
    store = ImageStore(tmp_path / "images", run.images.total_bytes, actor._needs)
    new = store.put(png(8, 8, b"new"))
    gone = {name for name, ref in run.refs.items() if ref not in store}
    assert new in store and gone and gone <= {"g0", "g1", "demo", "eval"}


@pytest.mark.parametrize("step_s", [0.0, -3600.0, 3600.0])
def test_a_clock_that_was_set_while_an_episode_runs_costs_none_of_its_images(tmp_path, step_s):
    """An episode began 100 s ago; the wall clock was set by `step_s` since. Its images lie between then and now, by either clock."""
    from slime_cua.launch.rollout_actor import RolloutActor

    actor = RolloutActor.__new__(RolloutActor)
    actor.run_dir = tmp_path
    began_s = time.time() - step_s - 100.0
    actor._running_since = {"g0-e0": (began_s, time.monotonic() - 100.0)}
    first_after_step_s = began_s + step_s + 1.0
    assert actor._needs().since_s <= min(began_s, first_after_step_s)
