"""Which checkpoint a restart takes, after any interruption of a save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_cua.core.errors import CheckpointError
from slime_cua.trainer import folders


def whole(folder: Path, step: int) -> Path:
    path = folders.step_folder(folder, step)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"x" * 100)
    files = {"__0_0.distcp": 100}
    (path / folders.MANIFEST).write_text(json.dumps({"step": step, "optimizer_steps": step, "files": files}))
    return path


def test_a_save_killed_half_way_leaves_the_one_before_as_the_latest(tmp_path: Path) -> None:
    whole(tmp_path, 100)
    unfinished = tmp_path / ".unfinished-step_00000120"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"x" * 60)
    assert folders.latest(tmp_path) == 100
    folders.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000100"]


def test_a_step_folder_without_manifest_does_not_count(tmp_path: Path) -> None:
    whole(tmp_path, 100)
    (tmp_path / "step_00000120").mkdir()
    assert folders.latest(tmp_path) == 100


def test_no_folder_and_an_empty_folder_have_no_latest(tmp_path: Path) -> None:
    assert folders.latest(tmp_path) is None
    assert folders.latest(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        folders.find(tmp_path)


def test_a_file_shorter_than_the_manifest_says_is_named(tmp_path: Path) -> None:
    path = whole(tmp_path, 100)
    (path / "__0_0.distcp").write_bytes(b"x" * 60)
    with pytest.raises(
        CheckpointError, match=r"__0_0.distcp is missing or truncated: 60 bytes, the manifest says 100"
    ):
        folders.find(tmp_path)


def test_publishing_replaces_a_step_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    old = whole(tmp_path, 100)
    (old / "mark").write_text("old")
    draft = tmp_path / ".unfinished-step_00000100"
    draft.mkdir()
    (draft / "mark").write_text("new")
    folders.publish(draft, old)
    assert (old / "mark").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000100"]


def test_pruning_keeps_the_newest_and_never_the_last_one_goes(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        whole(tmp_path, step)
    folders.prune(tmp_path, None)
    folders.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000020", "step_00000030"]
    folders.prune(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000030"]


def test_a_replacement_killed_between_its_two_renames_leaves_the_old_one_whole(tmp_path: Path) -> None:
    whole(tmp_path, 100).rename(tmp_path / ".unfinished-old-step_00000100")
    folders.remove_leftovers(tmp_path)
    assert folders.is_whole(folders.step_folder(tmp_path, 100))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_removal_killed_half_way_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    path = whole(tmp_path, 100)
    folders.remove(path)
    assert list(tmp_path.iterdir()) == []
    whole(tmp_path, 110).rename(tmp_path / ".unfinished-gone-step_00000110")
    assert folders.latest(tmp_path) is None
    folders.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_owner", [True, False])
def test_a_draft_whose_writing_fails_goes_at_once_by_the_rank_that_owns_it(
    tmp_path: Path, is_owner: bool
) -> None:
    draft = tmp_path / ".unfinished-step_00000007"
    draft.mkdir()
    (draft / "__0_0.distcp").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="disk full"), folders.whole_or_gone(draft, is_owner=is_owner):
        raise CheckpointError("disk full")
    assert draft.exists() is not is_owner
    with folders.whole_or_gone(tmp_path):
        pass
    assert tmp_path.exists()
