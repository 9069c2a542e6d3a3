"""Task files: both forms load, a fault is an error that names file and field."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from sandbox_cluster.tasks.loader import load_tasks
from sandbox_cluster.tasks.steps import inline_files
from slime_cua.core.errors import TaskError

OSWORLD: dict[str, Any] = {
    "id": "os/1",
    "snapshot": "os",
    "instruction": "Make a file.",
    "source": "",
    "trajectory": "trajectories/",
    "related_apps": ["os"],
    "config": [
        {"type": "launch", "parameters": {"command": ["xterm"]}},
        {"type": "sleep", "parameters": {"seconds": 2}},
    ],
    "evaluator": {
        "postconfig": [{"type": "activate_window", "parameters": {"window_name": "x", "strict": True}}],
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": "cat a", "shell": True},
        "expected": {"type": "rule", "rules": {"expected": "b\n"}},
    },
    "proxy": False,
    "fixed_ip": False,
    "possibility_of_env_change": "low",
}
HELIX: dict[str, Any] = {
    "id": "helix/1",
    "instruction": "Write it down.",
    "related_apps": [{"name": "mousepad", "version": "0.5"}],
    "complexity": "easy",
    "category": "file_only",
    "evaluator": {
        "judges": [
            {
                "result_getter": {"type": "vm_file", "path": "/home/user/a"},
                "expected_getter": None,
                "code": "def call_rule_judge_1(result, expected):\n    return 0.0",
            }
        ]
    },
}


def write(folder: Path, body: Any, name: str = "task.json") -> Path:
    path = folder / name
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    return path


def test_osworld_and_helix_tasks_load(tmp_path: Path) -> None:
    write(tmp_path, OSWORLD, "a.json")
    write(tmp_path, json.dumps(HELIX) + "\n\n" + json.dumps({**HELIX, "id": "helix/2"}), "b.jsonl")
    tasks = load_tasks([tmp_path])
    assert [task.id for task in tasks] == ["os/1", "helix/1", "helix/2"]
    assert tasks[0].family == "os" and tasks[0].metadata["proxy"] is False and not tasks[0].is_infeasible
    assert tasks[1].related_apps == ("mousepad",) and tasks[1].metadata["complexity"] == "easy"


def test_an_infeasible_evaluator_marks_the_task(tmp_path: Path) -> None:
    assert load_tasks([write(tmp_path, {**OSWORLD, "evaluator": {"func": "infeasible"}})])[0].is_infeasible


def step(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"type": kind, "parameters": parameters}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction": ""}, "instruction is missing"),
        ({"evaluator": None}, "evaluator is missing"),
        ({"colour": "red"}, "unknown fields colour"),
        ({"config": {"type": "sleep"}}, "config must be a list"),
        ({"config": [step("fly")]}, r"config\[0\].type 'fly' is unknown; this build has activate_window"),
        ({"config": [step("sleep", seconds=1), step("sleep")]}, r"config\[1\].parameters.seconds is missing"),
        ({"config": [step("sleep", seconds="long")]}, r"seconds = 'long' must be a number"),
        ({"config": [step("launch", command=[])]}, r"command must be a text or a list"),
        ({"config": [step("launch", command="x", colour=1)]}, r"parameters.colour is unknown"),
        ({"config": [step("execute", command="x", until={"moon": 1})]}, "until takes"),
        ({"config": [step("upload_file", files=[{"path": "/a"}])]}, "exactly one of content"),
        ({"config": [step("upload_file", files=[{"path": "/a", "local_path": "no"}])]}, "there is no file"),
        (
            {"config": [step("download", files=[{"path": "/a", "url": "file:///etc/x"}])]},
            "must begin with https",
        ),
        (
            {"config": [step("login", platform="googledrive")]},
            "'login' is not in this build: it needs a Google account",
        ),
        ({"config": [step("chrome_open_tabs", urls_to_open="https://x")]}, "urls_to_open must be a list"),
        (
            {"config": [step("update_browse_history", history=[{"url": "x"}])]},
            r"history\[0\] needs url, title",
        ),
        ({"evaluator": {"func": "compare_pptx_file"}}, r"is unknown.*did you mean compare_pptx_files\?"),
        (
            {"evaluator": {**OSWORLD["evaluator"], "postconfig": [step("fly")]}},
            r"evaluator.postconfig\[0\].type",
        ),
        ({"split": "middle"}, "split"),
    ],
)
def test_a_fault_names_file_and_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path, {**OSWORLD, **change})
    with pytest.raises(TaskError, match=message) as caught:
        load_tasks([path])
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[1]", "must be a JSON object"), ("3", "must be a JSON object")],
)
def test_a_file_that_is_no_task_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_tasks([write(tmp_path, text)])


def test_a_broken_line_is_named_by_number(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(HELIX) + "\n{\n", "t.jsonl")
    with pytest.raises(TaskError, match=r"t.jsonl:2: not valid JSON"):
        load_tasks([path])


def test_ids_are_unique_over_all_files(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="also in"):
        load_tasks([write(tmp_path, OSWORLD, "a.json"), write(tmp_path, OSWORLD, "b.json")])


def test_missing_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="does not exist"):
        load_tasks([tmp_path / "nothing"])
    with pytest.raises(TaskError, match=r"no .json"):
        load_tasks([tmp_path])


def test_an_allowed_download_loads(tmp_path: Path) -> None:
    body = {**OSWORLD, "config": [step("download", files=[{"path": "/a", "url": "https://files.example/y"}])]}
    path = write(tmp_path, body)
    assert load_tasks([path], allowed_urls=["https://files.example/"]) and load_tasks([path])
    with pytest.raises(TaskError, match="not allowed"):
        load_tasks([path], allowed_urls=["https://files.example.evil/"])


def test_windows_tasks_load_without_their_comments_and_ask_for_windows(tmp_path: Path) -> None:
    steps = [step("create_folder", path="C:\\a"), step("recycle_file", path="C:\\a\\b")]
    body = {**OSWORLD, "id": "1-WOS-3", "_comments": ["x"], "comments": "y", "config": steps}
    [task] = load_tasks([write(tmp_path, body)])
    assert task.metadata["os"] == "windows" and "_comments" not in task.metadata
    [task] = load_tasks([write(tmp_path, {**OSWORLD, "_comments": []})])
    assert "os" not in task.metadata


def test_local_files_are_relative_to_the_task_file_and_travel_inline(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"\x00\xff")
    body = {**OSWORLD, "config": [step("upload_file", files=[{"path": "/a", "local_path": "data.bin"}])]}
    [task] = load_tasks([write(tmp_path, body)])
    [file] = inline_files(task.config[0])["parameters"]["files"]
    assert base64.b64decode(file["content_base64"]) == b"\x00\xff" and "local_path" not in file
