"""Checkpoint folders on disk: which are whole, how one takes its place, how one goes. No torch.

A checkpoint is a folder step_XXXXXXXX with a manifest in it. It is written under another name, synced and renamed, so a folder
with that name is whole; leftovers of an interrupted save or removal are cleaned up by the next save.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from slime_cua.core.errors import CheckpointError
from slime_cua.core.files import fsync_folder

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished-"
_OLD = f"{UNFINISHED}old-"
_STEP = re.compile(r"step_(\d{8})")


def latest(folder: Path | str) -> int | None:
    """The newest whole checkpoint's step in `folder`, or None."""
    return max(whole_steps(folder), default=None)


def whole_steps(folder: Path | str) -> list[int]:
    """Steps of the checkpoints in `folder`, in no order."""
    if not Path(folder).is_dir():
        return []
    named = ((path, _STEP.fullmatch(path.name)) for path in Path(folder).iterdir())
    return [int(match[1]) for path, match in named if match and (path / MANIFEST).is_file()]


def step_folder(folder: Path | str, step: int) -> Path:
    """Where the checkpoint of `step` is."""
    return Path(folder) / f"step_{step:08d}"


def find(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint `folder`, or the newest in it, and its manifest. Raises CheckpointError unless every file is there."""
    step = latest(folder)
    path = folder if step is None else step_folder(folder, step)
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no whole checkpoint (no {MANIFEST})") from None
    for name, size in manifest["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else -1
        if found != size:
            raise CheckpointError(
                f"{path / name} is missing or truncated: {found} bytes, the manifest says {size}"
            )
    return path, manifest


def is_whole(path: Path) -> bool:
    """Whether the checkpoint folder `path` is there with every file in its length."""
    try:
        find(path)
    except (CheckpointError, ValueError, KeyError):
        return False
    return True


def prune(folder: Path, keep: int | None) -> None:
    """Remove whole checkpoints but the newest `keep` (at least one); None keeps all."""
    if keep is None:
        return
    for step in sorted(whole_steps(folder))[: -max(keep, 1)]:
        remove(step_folder(folder, step))


def remove(path: Path) -> None:
    """Remove a folder of ours: it is renamed first, so that nobody takes what is left of it for whole."""
    draft = path.with_name(f"{UNFINISHED}gone-{path.name}")
    shutil.rmtree(draft, ignore_errors=True)
    path.rename(draft)
    shutil.rmtree(draft, ignore_errors=True)


def publish(draft: Path, target: Path) -> None:
    """Sync the files, then put the folder in its place by rename; an old one of that name goes last."""
    for path in draft.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    fsync_folder(draft)
    old = target.with_name(f"{_OLD}{target.name}")
    if target.exists():
        target.rename(old)
    draft.rename(target)
    fsync_folder(target.parent)
    if old.exists():
        shutil.rmtree(old)


def recover(target: Path) -> None:
    """After a `publish` that was cut short: the old folder goes, or takes its place again where the new one did not come."""
    old = target.with_name(f"{_OLD}{target.name}")
    if old.exists() and not target.exists():
        old.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what interrupted saves and removals left in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{UNFINISHED}*"):
        if path.name.startswith(_OLD):
            recover(path.with_name(path.name.removeprefix(_OLD)))
        else:
            shutil.rmtree(path)
