"""Generate starter tasks: `python -m slime_cua.synthesis.starter.generate --out tasks/starter --train 64`.

An instance is a function of family, split and seed. To which split a draft may go is decided by a hash of its key (what
makes two instances near-duplicates), so no seed and no number of instances brings one idea into two splits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Literal

from slime_cua.core.actions import Action
from slime_cua.core.files import write_atomic
from slime_cua.core.types import Task
from slime_cua.synthesis.starter import forms, programs, screens
from slime_cua.synthesis.starter.draft import APPS, Crowded, Draft

Split = Literal["train", "demonstrations", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "demonstrations", "heldout")

FAMILIES: dict[str, Callable[[Random], Draft]] = {
    "press": screens.press,
    "missing": screens.missing,
    "place": screens.place_family,
    "boxes": screens.boxes,
    "dialog": screens.dialog,
    "files": programs.files,
    "hybrid": programs.hybrid,
    "entry": forms.entry,
    "editor": forms.editor,
    "theme": forms.theme,
}
SCREEN_FAMILIES = ("press", "missing", "place", "boxes", "dialog", "hybrid", "entry")
"""Families that cannot be solved without looking."""

APPS_FOLDER = Path(__file__).parent / "apps"
_PARTS: tuple[Split, ...] = ("heldout", "demonstrations", "train", "train")
"""Splits by shares of the keys."""
_MARKS: dict[Split, str] = {"train": "", "demonstrations": "d", "heldout": "h"}
"""In the ids of a split's tasks."""
_MAX_DRAWS = 2000


def split_of(key: tuple[Any, ...]) -> Split:
    """The only split that instances with this key may go to."""
    return _PARTS[hashlib.sha256(repr(key).encode()).digest()[0] % len(_PARTS)]


def draw(family: str, split: Split, seed: int) -> Draft:
    """The draft of `seed`: the first one drawn that has room on the screen and belongs to `split`."""
    rng = Random(f"starter {family} {split} {seed}")
    for _ in range(_MAX_DRAWS):
        try:
            draft = FAMILIES[family](rng)
        except Crowded:
            continue
        if split_of(draft.key) == split:
            return draft
    raise RuntimeError(f"family {family}: no {split} instance in {_MAX_DRAWS} draws; its keys are too few")


def make_task(family: str, split: Split, seed: int, apps: str = str(APPS_FOLDER)) -> Task:
    """One task. `apps`: where the programs of apps/ are for whoever reads the task."""
    return _task(draw(family, split, seed), family, split, seed, apps)


def make_tasks(family: str, split: Split, count: int, apps: str = str(APPS_FOLDER)) -> Iterator[Task]:
    """`count` tasks with different keys, of seeds 0, 1, ... without those that repeat a key."""
    seen: set[tuple[Any, ...]] = set()
    for seed in range(20 * count):
        draft = draw(family, split, seed)
        if draft.key not in seen:
            seen.add(draft.key)
            yield _task(draft, family, split, seed, apps)
        if len(seen) == count:
            return
    raise RuntimeError(f"family {family}: only {len(seen)} different {split} instances, {count} asked")


def to_osworld(task: Task) -> dict[str, Any]:
    """The task as the JSON object of a task file."""
    record: dict[str, Any] = {
        "id": task.id,
        "snapshot": task.related_apps[0] if task.related_apps else "os",
        "instruction": task.instruction,
        "source": "slime_cua starter",
        "config": list(task.config),
        "trajectory": "",
        "related_apps": list(task.related_apps),
        "evaluator": task.evaluator,
        "proxy": False,
        "fixed_ip": False,
        "possibility_of_env_change": "low",
        "family": task.family,
        "split": task.split,
        "is_infeasible": task.is_infeasible,
        "metadata": task.metadata,
    }
    return record


def write_tasks(out: Path, counts: dict[Split, int], families: tuple[str, ...] = tuple(FAMILIES)) -> int:
    """Write OUT/SPLIT/FAMILY.jsonl, one task a line; returns the number of tasks."""
    total = 0
    for split in SPLITS:
        folder = out / split
        apps = os.path.relpath(APPS_FOLDER, folder.resolve())
        for family in families:
            tasks = list(make_tasks(family, split, counts[split], apps))
            lines = [json.dumps(to_osworld(task), separators=(",", ":")) + "\n" for task in tasks]
            write_atomic(folder / f"{family}.jsonl", "".join(lines).encode())
            total += len(tasks)
    return total


def _task(draft: Draft, family: str, split: Split, seed: int, apps: str) -> Task:
    config = json.loads(json.dumps(draft.config).replace(f'"{APPS}/', f'"{apps}/'))
    return Task(
        id=f"starter/{family}-{_MARKS[split]}{seed:04d}",
        instruction=draft.instruction,
        config=tuple(config),
        evaluator=draft.evaluator,
        family=family,
        split=split,
        is_infeasible=draft.is_infeasible,
        related_apps=draft.related_apps,
        metadata={
            "routes": {way: _dump(actions) for way, actions in draft.routes.items()},
            "wrong": _dump(draft.wrong),
        },
    )


def _dump(actions: tuple[Action, ...]) -> list[dict[str, Any]]:
    return [
        {"type": action.type, **action.model_dump(mode="json", exclude_defaults=True)} for action in actions
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the starter tasks.")
    parser.add_argument("--out", type=Path, default=Path("tasks/starter"))
    parser.add_argument("--train", type=int, default=64, help="instances a family")
    parser.add_argument("--demonstrations", type=int, default=16, help="instances a family")
    parser.add_argument("--heldout", type=int, default=20, help="instances a family")
    args = parser.parse_args()
    total = write_tasks(args.out, {split: getattr(args, split) for split in SPLITS})
    print(f"{total} tasks of {len(FAMILIES)} families in {args.out}")


if __name__ == "__main__":
    main()
