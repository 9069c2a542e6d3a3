"""A desk without a display for starter tasks: the board's own model, a text buffer as editor, code run with HOME in a folder.

Geometry and judging are the real ones; what a window manager and X do to it is shown by tests/e2e/test_starter_tasks.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from slime_cua.core.actions import Action, CodeAction, GuiAction, TerminateAction
from slime_cua.core.coordinates import to_pixels
from slime_cua.core.types import Task
from slime_cua.synthesis.starter.apps.board import Model
from slime_cua.synthesis.starter.vocabulary import SCREEN_WH_PX

REPO = Path(__file__).parents[2]
TASKS = REPO / "tasks" / "starter"


def shipped(split: str, family: str = "*") -> list[Task]:
    """The tasks that the repository ships, read without the project's loader."""
    names = set(Task.model_fields)
    records = [
        json.loads(line)
        for path in sorted((TASKS / split).glob(f"{family}.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [Task(**{name: value for name, value in record.items() if name in names}) for record in records]


class Desk:
    """One attempt at `task` with its home folder at `home`."""

    def __init__(self, task: Task, home: Path) -> None:
        self.task, self.home = task, home
        self.board: Model | None = None
        self.editor_path: Path | None = None
        self.last_status: str | None = None
        home.mkdir(parents=True)
        for step in task.config:
            {"upload_file": self._upload, "execute": self._execute}[step["type"]](**step["parameters"])

    def act(self, action: Action) -> None:
        if isinstance(action, TerminateAction):
            self.last_status = action.status
        elif isinstance(action, CodeAction):
            self._code(action)
        elif isinstance(action, GuiAction):
            (self._board_gui if self.board else self._editor_gui)(action)

    def score(self) -> float:
        """The mean of the judges; OSWorld's rule where the last action says that the task cannot be done."""
        if "func" in self.task.evaluator:
            assert self.task.evaluator["func"] == "infeasible"
            return float(self.last_status == "failure")
        if self.last_status == "failure":
            return 0.0
        scores = [self._judge(**judge) for judge in self.task.evaluator["judges"]]
        return sum(scores) / len(scores)

    def _upload(self, files: list[dict[str, str]]) -> None:
        for file in files:
            path = self._here(file["path"])
            path.parent.mkdir(parents=True, exist_ok=True)
            if "content" in file:
                path.write_text(file["content"].replace("/home/user", str(self.home)))

    def _execute(self, command: list[str], until: dict[str, int]) -> None:
        assert until == {"returncode": 0}
        program = command[3]
        if program.endswith("/board.py"):
            spec = self._here(command[4])
            self.board = Model(json.loads(spec.read_text()))
            spec.unlink()
        else:
            assert command[5:7] == ["mousepad", "--disable-server"]
            self.editor_path = self._here(command[7])
            self.buffer, self.is_all_selected = self.editor_path.read_text(), False

    def _board_gui(self, action: GuiAction) -> None:
        assert self.board is not None
        if action.kind == "left_click":
            assert action.point is not None
            self.board.click(*to_pixels(action.point, SCREEN_WH_PX))
        elif action.kind == "type":
            for char in action.text or "":
                self.board.key(char, char)
        elif action.kind == "key":
            (key,) = action.keys
            self.board.key(*(("Return", "\r") if key == "enter" else (key, key)))

    def _editor_gui(self, action: GuiAction) -> None:
        assert self.editor_path is not None
        if action.kind == "type":
            self.buffer = (action.text or "") + ("" if self.is_all_selected else self.buffer)
            self.is_all_selected = False
        elif action.keys == ("ctrl", "a"):
            self.is_all_selected = True
        elif action.keys == ("ctrl", "s"):
            self.editor_path.write_text(self.buffer)

    def _code(self, action: CodeAction) -> None:
        if action.language == "python":
            before, os.environ["HOME"] = os.environ.get("HOME", ""), str(self.home)
            try:
                exec(action.code, {})
            finally:
                os.environ["HOME"] = before
        else:
            environment = {"HOME": str(self.home), "PATH": os.environ["PATH"]}
            subprocess.run(["/bin/bash", "-c", action.code], env=environment, cwd=self.home, check=True)

    def _judge(self, result_getter: dict[str, Any], expected_getter: None, code: str) -> float:
        result: str | None = None
        if result_getter["type"] == "vm_file":
            path = self._here(result_getter["path"])
            result = str(path) if path.exists() else None
        else:
            command = [part.replace("/home/user", str(self.home)) for part in result_getter["command"]]
            result = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        space: dict[str, Any] = {}
        exec(code, space)
        return space["call_rule_judge_1"](result, expected_getter)

    def _here(self, path: str) -> Path:
        assert path.startswith("/home/user/")
        return self.home / path.removeprefix("/home/user/")
