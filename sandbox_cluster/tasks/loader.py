"""Task files to Tasks: OSWorld, WindowsAgentArena and OS-Helix items, one a .json file, a list, or one a line of .jsonl.

Everything that could not be run is an error now, with file and field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sandbox_cluster.judge.spec import parse
from sandbox_cluster.tasks.steps import check_steps, resolve_files
from slime_cua.core.errors import TaskError
from slime_cua.core.types import Task

_OSWORLD_ONLY = (
    "snapshot",
    "source",
    "trajectory",
    "proxy",
    "fixed_ip",
    "possibility_of_env_change",
    "hint",
    "env_may_change",
)
_HELIX_ONLY = (
    "complexity",
    "category",
    "success_criteria",
    "evaluation_requirements_text",
    "need_rule_judge",
    "need_vlm_judge",
    "vlm_desc",
)
_COMMENTS = {"_comments", "comments", "_commments"}
_WINDOWS_ID = r"(?i)-WOS(-\d+)?$"
_KNOWN = {
    "id",
    "instruction",
    "config",
    "evaluator",
    "family",
    "split",
    "is_infeasible",
    "related_apps",
    "metadata",
    *_OSWORLD_ONLY,
    *_HELIX_ONLY,
}


OnBad = Callable[[str, TaskError], None]
"""Told of a task that does not load: its id, or its place where it has none, and why."""


def _stop(name: str, error: TaskError) -> None:
    raise error


def load_tasks(
    paths: Iterable[Path | str], allowed_urls: Sequence[str] | None = None, on_bad: OnBad = _stop
) -> list[Task]:
    """All tasks of files and folders (.json and .jsonl, sorted by path); ids must be unique. Raises TaskError, unless `on_bad`
    takes what does not load: then the others are loaded."""
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for path in paths:
        for file in _files(Path(path)):
            for task in _load_file(file, allowed_urls, on_bad):
                if task.id in seen:
                    other = seen[task.id]
                    on_bad(
                        task.id, TaskError(f"{file}: id {task.id!r} is also in {other}; ids must be unique")
                    )
                    continue
                seen[task.id] = str(file)
                tasks.append(task)
    return tasks


def _load_file(path: Path, allowed_urls: Sequence[str] | None, on_bad: OnBad) -> list[Task]:
    try:
        places = _places(path)
    except TaskError as error:
        on_bad(str(path), error)
        return []
    tasks = []
    for where, text in places:
        name = where
        try:
            body = _json(text, where) if isinstance(text, str) else text
            if isinstance(body, dict) and body.get("id"):
                name = str(body["id"])
            tasks.append(make_task(body, path.parent, where, allowed_urls))
        except TaskError as error:
            on_bad(name, error)
    return tasks


def _places(path: Path) -> list[tuple[str, Any]]:
    """Where each task of a file stands, and its text (a line) or JSON."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"task file {path} cannot be read: {error}") from None
    if path.suffix == ".jsonl":
        return [
            (f"{path}:{number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()
        ]
    body = _json(text, str(path))
    if isinstance(body, list):
        return [(f"{path}[{n}]", one) for n, one in enumerate(body)]
    return [(str(path), body)]


def make_task(body: Any, folder: Path, where: str, allowed_urls: Sequence[str] | None = None) -> Task:
    """A checked Task; local files of its steps are relative to `folder`. Raises TaskError naming `where` and the field.

    WindowsAgentArena's comments are left out; its tasks, whose ids end in -WOS, ask for a Windows desktop in their metadata.
    """
    if not isinstance(body, dict):
        raise TaskError(f"{where}: a task must be a JSON object, not {type(body).__name__}")
    for name in ("id", "instruction", "evaluator"):
        if not body.get(name):
            raise TaskError(f"{where}: {name} is missing or empty")
    unknown = sorted(set(body) - _KNOWN - _COMMENTS)
    if unknown:
        raise TaskError(f"{where}: unknown fields {', '.join(unknown)}")
    urls = None if allowed_urls is None else tuple(allowed_urls)
    try:
        steps = body.get("config") or ()
        check_steps(steps, "config", urls)
        config = tuple(resolve_files(dict(step), folder, f"config[{n}]") for n, step in enumerate(steps))
        evaluator = parse(body["evaluator"])
        check_steps(evaluator.postconfig, "evaluator.postconfig", urls)
        metadata = {name: body[name] for name in (*_OSWORLD_ONLY, *_HELIX_ONLY) if name in body}
        if re.search(_WINDOWS_ID, str(body["id"])):
            metadata["os"] = "windows"
        return Task(
            id=str(body["id"]),
            instruction=body["instruction"],
            config=config,
            evaluator=body["evaluator"],
            family=body.get("family") or body.get("snapshot") or "",
            split=body.get("split", ""),
            is_infeasible=evaluator.is_infeasible,
            related_apps=tuple(_names(body.get("related_apps", ()))),
            metadata={**metadata, **body.get("metadata", {})},
        )
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from None
    except ValueError as error:
        raise TaskError(f"{where}: {error}") from None


def _names(apps: Any) -> list[str]:
    """Names of related apps: texts, or OS-Helix' {"name": ...}."""
    return [app["name"] if isinstance(app, dict) and "name" in app else str(app) for app in apps]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise TaskError(f"{where}: not valid JSON: {error}") from None


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(
            file for file in path.rglob("*") if file.suffix in (".json", ".jsonl") and file.is_file()
        )
        if not files:
            raise TaskError(f"{path} has no .json or .jsonl task file")
        return files
    if not path.exists():
        raise TaskError(f"task path {path} does not exist")
    return [path]
