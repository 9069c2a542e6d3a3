"""`slime-cua tasks check` on a folder in which some tasks do not load: those are quarantined, the others go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sandbox_cluster.tasks.cli import main
from sandbox_cluster.tasks.loader import load_tasks
from slime_cua.core.errors import TaskError


def task(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "instruction": "-", "evaluator": {"func": "infeasible"}, **more}


def broken_folder(folder: Path) -> Path:
    (folder / "a.json").write_text(json.dumps(task("fly", config=[{"type": "fly"}])))
    (folder / "b.json").write_text("no JSON")
    (folder / "c.jsonl").write_text('{"id": "cut\n' + json.dumps(task("bad", evaluator={"func": "guess"})))
    return folder


def test_a_task_that_does_not_load_is_quarantined_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, quarantine = tmp_path / "tasks", tmp_path / "bad.jsonl"
    folder.mkdir()
    assert main(["check", str(broken_folder(folder)), "--quarantine", str(quarantine)]) == 1
    rows = [json.loads(line) for line in quarantine.read_text().splitlines()]
    reasons = {row["task_id"]: row["reason"] for row in rows}
    assert set(reasons) == {"fly", str(folder / "b.json"), f"{folder}/c.jsonl:1", "bad"}
    assert "'fly' is unknown" in reasons["fly"] and "'guess' is unknown" in reasons["bad"]
    assert "0 of 4 tasks score exactly 0 before the first action, 4 are bad" in capsys.readouterr().out


def test_the_others_are_loaded_and_an_id_counts_once(tmp_path: Path) -> None:
    broken_folder(tmp_path)
    (tmp_path / "d.json").write_text(json.dumps([task("good"), task("good"), task("other")]))
    told: dict[str, str] = {}
    loaded = load_tasks([tmp_path], on_bad=lambda name, error: told.update({name: str(error)}))
    assert [one.id for one in loaded] == ["good", "other"]
    assert "ids must be unique" in told["good"] and len(told) == 5
    with pytest.raises(TaskError, match="'fly' is unknown"):
        load_tasks([tmp_path])
