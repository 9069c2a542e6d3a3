"""Checkpoint folders on disk: which are whole, how one takes its place, how one goes. No torch.

A checkpoint is a folder step_XXXXXXXX with a manifest in it. It is written under another name, synced and renamed, so a folder
with that name is whole; leftovers of an interrupted save or removal are cleaned up by the next save.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from slime_cua.core.errors import CheckpointError, DamagedCheckpointError
from slime_cua.core.files import fsync_folder, write_atomic

MANIFEST = "manifest.json"
READERS = ".readers"
"""Lock file of those who read a checkpoint."""
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
    """Remove whole checkpoints but the newest `keep` (at least one), the one with the best score, and those being read.

    None keeps all.
    """
    if keep is None:
        return
    for step in removable_steps(folder, but=sorted(whole_steps(folder))[-max(keep, 1) :]):
        remove(step_folder(folder, step))


def removable_steps(folder: Path, *, but: Container[int]) -> list[int]:
    """Whole checkpoints that may go, oldest first: not in `but`, not the one with the best score, and read by nobody."""
    best = best_step(folder)
    others = (step for step in sorted(whole_steps(folder)) if step not in but and step != best)
    return [step for step in others if not is_read(step_folder(folder, step))]


def set_score(path: Path, score: float) -> None:
    """Note how well the policy of the checkpoint folder `path` did; higher is better."""
    manifest = json.loads((path / MANIFEST).read_text())
    write_atomic(path / MANIFEST, json.dumps({**manifest, "score": score}, indent=1).encode())


def best_step(folder: Path | str) -> int | None:
    """The step with the highest score, the newer of equals; None when none has one."""
    scored = []
    for step in whole_steps(folder):
        score = json.loads((step_folder(folder, step) / MANIFEST).read_text()).get("score")
        if score is not None:
            scored.append((float(score), step))
    return max(scored)[1] if scored else None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """While inside, no `prune` of any process removes the checkpoint folder `path`."""
    lock = path / READERS
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:  # a folder that cannot be written to is not pruned either
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def is_read(path: Path) -> bool:
    """Whether somebody is inside `reading(path)`."""
    if not (path / READERS).is_file():
        return False
    with (path / READERS).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def checksum(path: Path) -> str:
    """CRC-32 of a file's bytes, hex: made against rotten and half-copied files, not against an adversary."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def check_checksums(path: Path, manifest: dict[str, Any], names: Iterable[str]) -> None:
    """Raise DamagedCheckpointError for the first of the files `names` whose bytes are not those that were written."""
    known = manifest.get("crc32", {})
    for name in names:
        if name in known and checksum(path / name) != known[name]:
            raise DamagedCheckpointError(
                f"{path / name} was changed or damaged since it was written (CRC-32 {known[name]} is not its own): "
                "copy it again, or resume from another step"
            )


def remove(path: Path) -> None:
    """Remove a folder of ours: it is renamed first, so that nobody takes what is left of it for whole."""
    draft = path.with_name(f"{UNFINISHED}gone-{path.name}")
    shutil.rmtree(draft, ignore_errors=True)
    path.rename(draft)
    shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def whole_or_gone(draft: Path, *, is_owner: bool = True) -> Iterator[None]:
    """Removes the folder `draft` when the block fails: half a checkpoint would keep a full disk full. is_owner: of the ranks
    that fail together, one removes it."""
    try:
        yield
    except BaseException:
        if is_owner:
            shutil.rmtree(draft, ignore_errors=True)
        raise


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
