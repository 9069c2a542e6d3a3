"""What of a run directory may go, and its removal under the run's lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slime_cua.core.errors import PreflightError
from slime_cua.launch.image_needs import is_phase_done, needed_images, reference_counts, report_images
from slime_cua.launch.run_state import RunState
from slime_cua.launch.runs import human, size_bytes
from slime_cua.trainer.folders import UNFINISHED, removable_steps, step_folder


@dataclass(frozen=True)
class Removal:
    """One file or folder that may go."""

    path: Path
    why: str
    num_bytes: int


def collect(run: Path, *, is_dry: bool, with_consumed: bool = False) -> str:
    """Remove what nothing references (or only say what); a text that says so.

    Holds the run's lock meanwhile. Raises PreflightError when a run is at work there.
    """
    started = time.monotonic()
    with _locked(run):
        removals = plan(run, with_consumed=with_consumed)
        if not is_dry:
            for removal in removals:
                _remove(removal.path)
    by_reason: defaultdict[str, list[Removal]] = defaultdict(list)
    for removal in removals:
        by_reason[removal.why].append(removal)
    verb = "would remove" if is_dry else "removed"
    lines = [
        f"{run}: {verb} {len(some)} {why}, {human(sum(one.num_bytes for one in some))}"
        for why, some in by_reason.items()
    ]
    return "\n".join(lines) or f"{run}: nothing to remove ({time.monotonic() - started:.1f} s)"


def plan(run: Path, *, with_consumed: bool = False) -> list[Removal]:
    """What may go, in a fixed order. Raises CheckpointError when the run state cannot be read: then nothing may."""
    return [*_checkpoints(run), *_images(run, with_consumed), *_drafts(run)]


def _checkpoints(run: Path) -> Iterator[Removal]:
    folder, state = run / "checkpoints", RunState.load(run)
    for step in removable_steps(folder, but=state.checkpoints if state else ()):
        path = step_folder(folder, step)
        yield Removal(path, "checkpoint(s) that the run state does not name", size_bytes(path))
    if is_phase_done(run, "sft") and (folder / "sft").exists():
        yield Removal(
            folder / "sft", "checkpoint(s) of the cold start, which is done", size_bytes(folder / "sft")
        )
    for path in sorted(folder.glob(f"{UNFINISHED}*")):
        if not _is_all_there_is(path):
            yield Removal(path, "leftover(s) of an interrupted save", size_bytes(path))


def _is_all_there_is(draft: Path) -> bool:
    """A checkpoint that was moved away for a new one, which never took its place: the next start moves it back."""
    old, name = f"{UNFINISHED}old-", draft.name
    return name.startswith(old) and not draft.with_name(name.removeprefix(old)).exists()


def _images(run: Path, with_consumed: bool) -> Iterator[Removal]:
    kept = needed_images(run) | report_images(run) if with_consumed else set(reference_counts(run))
    why = (
        "screenshot(s) that training needs no more"
        if with_consumed
        else "screenshot(s) that no episode names"
    )
    for path in sorted((run / "images").glob("*/*.png")):
        if path.stem not in kept:
            yield Removal(path, why, path.stat().st_size)


def _drafts(run: Path) -> Iterator[Removal]:
    """Temporary files of writes that never ended: nobody writes while the lock is ours."""
    for pattern in ("images/*/.new-*", ".state.json.*", ".phases.json.*", ".config.yaml.*", ".report*.*"):
        for path in sorted(run.glob(pattern)):
            yield Removal(path, "leftover(s) of an interrupted write", path.stat().st_size)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    handle = os.open(run / "lock", os.O_RDWR)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PreflightError(
                f"a run is at work in {run}: nothing of it is removed; try again when it has ended"
            ) from None
        yield
    finally:
        os.close(handle)
