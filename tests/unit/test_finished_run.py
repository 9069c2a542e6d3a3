"""A finished run that is started again shows what it found, at once; asked for more, it goes on or says why not."""

import json
from pathlib import Path

import pytest

from slime_cua import train
from slime_cua.cli import guarded
from slime_cua.config.base import load
from slime_cua.config.run import RunConfig
from slime_cua.core.types import Episode, EpisodeGroup
from slime_cua.data.episodes import EpisodeStore
from slime_cua.launch.run_dir import RunDir
from tests.e2e.job import CONFIG, ROOT, write_tasks

PHASES = {
    "sft": {"seconds": 9.0, "num_steps": 8.0},
    "rl": {"seconds": 70.0, "num_steps": 2.0},
    **{f"eval_{arm}": {"eval/success": 0.5} for arm in ("base", "sft", "rl")},
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """The command on a finished run (or one without the phases `lost`), with overrides: exit code."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("SLIME_CUA_GATEWAY_TOKEN", raising=False)
    overrides = [f"run_dir={tmp_path / 'run'}", "minutes=1", "evaluation.num_tasks=0", "num_steps=2"]
    for split in ("train", "heldout"):
        overrides.append(f"tasks.{split}=[{write_tasks(tmp_path / f'{split}.jsonl', split)}]")
    overrides.append("tasks.demonstrations=[]")
    with RunDir(load(RunConfig, CONFIG, overrides)) as run:
        for name, result in PHASES.items():
            run.finish_phase(name, result)
        for arm, score in (("base", 0.0), ("sft", 0.0), ("rl", 1.0)):
            store = EpisodeStore(run.episodes(f"eval_{arm}"))
            for number, line in enumerate((tmp_path / "heldout.jsonl").read_text().splitlines()):
                store.append(played(f"eval_{arm}-{number:05d}", json.loads(line)["id"], score))
    return lambda *more: guarded(train.main, ["--config", str(CONFIG), *overrides, *more])


def played(group_id, task_id, score):
    episode = Episode(
        episode_id=f"{group_id}-0",
        group_id=group_id,
        task_id=task_id,
        turns=(),
        reward=score,
        stop_reason="terminated",
        started_s=0.0,
        ended_s=1.0,
    )
    return EpisodeGroup(group_id=group_id, task_id=task_id, episodes=(episode,), admitted_version=0)


def is_started(run):
    """Whether anything but the table was begun."""
    return (run / "sandbox").exists() or (run / "logs/ray_job").exists() or (run / "wandb").exists()


def test_it_prints_its_table_and_starts_nothing(tmp_path, start, capsys):
    assert start() == 0
    output = capsys.readouterr().out
    assert "every phase is done: nothing is started" in output
    scores = output.split("Held-out success")[1].split("\nTime\n")[0]
    rows = {line.split()[0]: line for line in scores.splitlines() if line}
    assert "0.0 [0.0, 0.0]" in rows["sft"] and "100.0 [100.0, 100.0]" in rows["rl"]
    assert (tmp_path / "run/report.html").exists() and not is_started(tmp_path / "run")
    assert json.loads((tmp_path / "run/phases.json").read_text()) == PHASES


def test_more_steps_within_minutes_that_are_over_are_refused_with_the_way_out(tmp_path, start, capsys):
    assert start("num_steps=5") == 0
    output = capsys.readouterr().out
    assert (
        "RL ended at step 2 of 5, when its 1 minutes were over: raise minutes (0: no limit) to go on"
        in output
    )
    assert "Held-out success" in output and not is_started(tmp_path / "run")


@pytest.mark.parametrize(
    ("more", "lost"),
    [
        (["num_steps=5", "minutes=2"], ()),
        (["num_steps=5", "minutes=0"], ()),
        ([], ("eval_rl",)),
        ([], ("sft",)),
    ],
)
def test_more_steps_or_a_phase_that_is_missing_start_it(tmp_path, start, capsys, more, lost):
    path = tmp_path / "run/phases.json"
    path.write_text(json.dumps({name: result for name, result in PHASES.items() if name not in lost}))
    assert start(*more, "sandbox.gateway_url=http://127.0.0.1:9") == 1
    output = capsys.readouterr()
    assert "SLIME_CUA_GATEWAY_TOKEN" in output.err and "Held-out success" not in output.out
    assert ("RL goes on from step 2 to 5" in output.out) == bool(more)
    assert ("rl" in json.loads(path.read_text())) == (not more)


def test_a_full_disk_is_no_reason_to_hide_what_was_found(tmp_path, start, capsys):
    """What a run at work needs on its disk is not asked of one that is done."""
    huge = b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,0]}}'
    model = tmp_path / "model"
    model.mkdir()
    for path in Path("models/tiny_base").iterdir():
        if path.suffix in (".json", ".jinja"):
            (model / path.name).write_bytes(path.read_bytes())
    (model / "model.safetensors").write_bytes(len(huge).to_bytes(8, "little") + huge)
    config = tmp_path / "run/config.yaml"
    config.write_text(config.read_text().replace("models/tiny_base", str(model)))
    assert start(f"model={model}") == 0
    assert "Held-out success" in capsys.readouterr().out
