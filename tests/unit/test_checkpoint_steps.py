"""Which checkpoint a restart takes, after any interruption of a save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_cua.core.errors import CheckpointError
from slime_cua.trainer import checkpoint


def whole(folder: Path, step: int) -> Path:
    path = checkpoint.step_folder(folder, step)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"x" * 100)
    files = {"__0_0.distcp": 100}
    (path / checkpoint.MANIFEST).write_text(
        json.dumps({"step": step, "optimizer_steps": step, "files": files})
    )
    return path


def test_a_save_killed_half_way_leaves_the_one_before_as_the_latest(tmp_path: Path) -> None:
    whole(tmp_path, 100)
    unfinished = tmp_path / ".unfinished-step_00000120"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"x" * 60)
    assert checkpoint.latest(tmp_path) == 100
    checkpoint._remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000100"]


def test_a_step_folder_without_manifest_does_not_count(tmp_path: Path) -> None:
    whole(tmp_path, 100)
    (tmp_path / "step_00000120").mkdir()
    assert checkpoint.latest(tmp_path) == 100


def test_no_folder_and_an_empty_folder_have_no_latest(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        checkpoint._find(tmp_path)


def test_a_file_shorter_than_the_manifest_says_is_named(tmp_path: Path) -> None:
    path = whole(tmp_path, 100)
    (path / "__0_0.distcp").write_bytes(b"x" * 60)
    with pytest.raises(
        CheckpointError, match=r"__0_0.distcp is missing or truncated: 60 bytes, the manifest says 100"
    ):
        checkpoint._find(tmp_path)


def test_publishing_replaces_a_step_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    old = whole(tmp_path, 100)
    (old / "mark").write_text("old")
    draft = tmp_path / ".unfinished-step_00000100"
    draft.mkdir()
    (draft / "mark").write_text("new")
    checkpoint._publish(draft, old)
    assert (old / "mark").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000100"]


def test_pruning_keeps_the_newest_and_never_the_last_one_goes(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        whole(tmp_path, step)
    checkpoint.prune(tmp_path, None)
    checkpoint.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000020", "step_00000030"]
    checkpoint.prune(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000030"]
