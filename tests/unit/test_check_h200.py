"""The command that shows the system on GPUs: what it refuses, what it keeps, and what it counts. No run is started here."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slime_cua.config.base import load
from slime_cua.config.run import RunConfig
from slime_cua.convert import read_config
from slime_cua.core.types import Episode, EpisodeGroup, Turn
from slime_cua.data.episodes import EpisodeStore
from slime_cua.launch.run_state import Batch, RunState
from slime_cua.trainer.layouts import layout_faults

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import bench_tables  # noqa: E402
import check_h200  # noqa: E402
import check_h200_common as common  # noqa: E402
import check_h200_live  # noqa: E402


def command(script, *arguments, **environment):
    """The finished command."""
    return subprocess.run(
        ["bash", str(ROOT / "recipes" / script), *map(str, arguments)],
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "SLIME_CUA_PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip


@pytest.fixture
def check(tmp_path):
    made = common.Check(gpus=1, folder=tmp_path / "out", parts=["live"], python="/bin/bash", is_cpu=True)
    made.end_s = time.monotonic() + 20
    made.folder.mkdir()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["3", "F"], "invalid choice"),
        (["1", "F", "lvie"], "no part 'lvie': choose from live, faults, layouts, mfu"),
        (["1", "F/file/x"], "is a file: give a folder for the results"),
        (["1", "F", "--model", "F"], "holds no config.json: give a Hugging Face folder"),
        (["1", "F", "--gateway", "http://x"], "needs the client's token in SLIME_CUA_GATEWAY_TOKEN"),
        (["1", "F", "--minutes", "-1"], "give a number above 0"),
    ],
)
def test_bad_input_is_a_sentence_and_nothing_starts(tmp_path, arguments, sentence):
    (tmp_path / "file").touch()
    done = command("check_h200.sh", *(word.replace("F", str(tmp_path)) for word in arguments))
    assert (
        done.returncode == 2 and sentence in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and done.stdout == ""


def test_without_enough_gpus_the_way_out_is_said(tmp_path):
    done = command("check_h200_4.sh", tmp_path / "out", "layouts")
    assert done.returncode == 2 and "no GPU is seen by torch" in done.stderr
    assert "SLIME_CUA_CHECK_DEVICE=cpu" in done.stderr and not (tmp_path / "out").exists()


def test_an_interpreter_without_torch_is_named(check):
    check.python = "/bin/false"
    assert "/bin/false has no torch: run bash scripts/env.sh" in check_h200.missing(check)


def test_a_part_that_fails_is_a_row_and_the_report_keeps_the_others(check):
    check_h200.keep(check, "layouts", [bench_tables.at_most("apart", 0.5, 1.0)])
    check_h200.keep(check, "live", [bench_tables.at_most("lag", 2, 1)])
    rows = check_h200.measured("live", check)
    assert rows[0].name == "failed" and rows[0].is_met is False and "ended before update 1" in rows[0].value
    report = (check.folder / "report.md").read_text()
    assert "| apart | 0.5 | at most 1 | met |" in report and "MISSED" in report and "| lag |" not in report
    assert len(json.loads((check.folder / "results.json").read_text())) == 2


def test_parts_share_the_time_in_the_relation_of_their_budgets():
    assert sum(check_h200.BUDGET_S.values()) < 9 * 60
    assert check_h200.share_of([], ["live", "mfu"]) == 0
    assert check_h200.share_of(["mfu"], ["live", "mfu"]) == pytest.approx(130 / 340)


def test_at_its_deadline_a_child_ends_with_all_that_it_started(check):
    child = check.start("child", ["-c", "trap '' INT; setsid sleep 50 & exec sleep 50"])
    while len(child.pids("sleep 50")) < 2:
        time.sleep(0.02)
    check.end_s = time.monotonic() + 0.1
    check.patience_s = 0.2
    with pytest.raises(common.PartFailed, match="not done within"):
        check.finish(child)
    assert child.process.returncode is not None and child.pids() == []


def test_lags_and_missing_versions_are_counted_from_what_the_run_recorded(tmp_path):
    store, batches = EpisodeStore(tmp_path / "episodes/rl.jsonl"), []
    store.path.parent.mkdir()
    for number, versions in enumerate(((0, 0), (0, 1), (2, -1, 3, 0))):
        turn = Turn(index=0, starts_segment=True, context_ids=(1,), response_ids=versions, response_logp=(-1.0,) * len(versions),
                    response_versions=versions)  # fmt: skip
        episode = Episode(
            episode_id=f"e{number}",
            group_id=f"g{number}",
            task_id="t",
            turns=(turn,),
            reward=1.0,
            stop_reason="terminated",
        )
        store.append(
            EpisodeGroup(group_id=f"g{number}", task_id="t", episodes=(episode,), admitted_version=0)
        )
        batches.append(Batch({f"g{number}": store.last_start}, number + 1))
    RunState(version=3, batches=batches).save(tmp_path)
    lags, num_without = check_h200_live.trained_lags(tmp_path)
    assert lags == {0: 4, 1: 1, 3: 1, 2: 1, -1: 1} and num_without == 2


def test_repeated_key_value_heads_give_each_query_head_what_it_had(tmp_path):
    """Tensor parallelism over four ranks needs four of them; the policy has two for four query heads."""
    source = ROOT / "models/tiny_base"
    target = check_h200_live.with_kv_heads(source, tmp_path / "four", 4)
    old, new = (load_file(folder / "model.safetensors") for folder in (source, target))
    assert json.loads((target / "config.json").read_text())["text_config"]["num_key_value_heads"] == 4
    changed = [name for name in old if old[name].shape != new[name].shape]
    assert len(changed) == 8 and set(old) == set(new)
    for name in changed:
        before, after = old[name].unflatten(0, (2, 64)), new[name].unflatten(0, (4, 64))
        assert all((after[head] == before[head // 2]).all() for head in range(4))
    assert all((old[name] == new[name]).all() for name in old if name not in changed)
    with pytest.raises(common.PartFailed, match="do not become 3"):
        check_h200_live.with_kv_heads(source, tmp_path / "three", 3)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("is_cpu", [False, True])
def test_every_number_of_gpus_has_a_legal_run(tmp_path, gpus, is_cpu):
    """Ranks and engines fill the GPUs; one GPU is shared by mapped memory."""
    check = common.Check(gpus=gpus, folder=tmp_path, parts=["live"], python="", is_cpu=is_cpu)
    keys = check_h200_live.run_keys(check, tmp_path / "run", 10)
    config = load(RunConfig, ROOT / "recipes/check_h200.yaml", keys)
    parallel, engine = config.trainer.parallel, config.rollout.engine
    assert layout_faults(read_config(config.model), parallel) == []
    assert config.num_steps == 10 and engine.kind == ("embedded" if is_cpu else "sglang")
    if not is_cpu:
        taken = (
            1 if config.rollout.publish.way == "ipc" else parallel.world_size + engine.num_engines * engine.tp
        )
        assert taken == gpus and (config.rollout.publish.way == "ipc") == (gpus == 1)


def test_a_server_that_is_not_there_serves_nothing():
    assert check_h200_live.served_version(os.getpid()) == -1
