"""Which checkpoints stay, and whether their bytes are those that were written."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from slime_cua.core.errors import CheckpointError
from slime_cua.trainer import folders, progress
from slime_cua.trainer.pending_save import PendingSave
from tests.unit.test_checkpoint_steps import whole


def steps(folder: Path) -> list[int]:
    return sorted(folders.whole_steps(folder))


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path) -> None:
    for step, score in ((10, 0.2), (20, 0.7), (30, 0.7), (40, 0.1), (50, None)):
        path = whole(tmp_path, step)
        if score is not None:
            folders.set_score(path, score)
    assert folders.best_step(tmp_path) == 30
    folders.prune(tmp_path, 1)
    assert steps(tmp_path) == [30, 50]
    assert folders.is_whole(folders.step_folder(tmp_path, 30))


def hold(path: Path, pipe: Any) -> None:
    with folders.reading(path):
        pipe.send("reading")
        pipe.recv()


def test_a_checkpoint_that_another_process_reads_is_not_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        whole(tmp_path, step)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    reader = context.Process(target=hold, args=(folders.step_folder(tmp_path, 10), theirs))
    reader.start()
    try:
        assert ours.recv() == "reading"
        folders.prune(tmp_path, 1)
        assert steps(tmp_path) == [10, 30]
    finally:
        ours.send("go")
        reader.join(timeout=60)
    folders.prune(tmp_path, 1)
    assert steps(tmp_path) == [30]


def test_a_reader_that_died_holds_nothing(tmp_path: Path) -> None:
    for step in (10, 20):
        whole(tmp_path, step)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    reader = context.Process(target=hold, args=(folders.step_folder(tmp_path, 10), theirs))
    reader.start()
    assert ours.recv() == "reading"
    reader.kill()
    reader.join(timeout=60)
    folders.prune(tmp_path, 1)
    assert steps(tmp_path) == [20]


def test_one_changed_byte_is_named_though_the_length_is_right(tmp_path: Path) -> None:
    path = whole(tmp_path, 10)
    manifest = json.loads((path / folders.MANIFEST).read_text())
    manifest["crc32"] = {"__0_0.distcp": folders.checksum(path / "__0_0.distcp")}
    folders.check_checksums(path, manifest, ["__0_0.distcp"])
    (path / "__0_0.distcp").write_bytes(b"x" * 50 + b"y" + b"x" * 49)
    assert folders.is_whole(path)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp was changed or damaged"):
        folders.check_checksums(path, manifest, ["__0_0.distcp"])


def test_the_checksum_is_the_known_one(tmp_path: Path) -> None:
    """CRC-32 of "123456789" is cbf43926 by definition."""
    (tmp_path / "file").write_bytes(b"123456789")
    assert folders.checksum(tmp_path / "file") == "cbf43926"


def test_who_waits_for_a_save_gets_its_error_once(tmp_path: Path) -> None:
    def fail() -> None:
        time.sleep(0.05)
        raise CheckpointError("the disk is full")

    pending = PendingSave(tmp_path, fail, tmp_path)
    with pytest.raises(CheckpointError, match="the disk is full"):
        pending.wait()
    assert pending.is_done
    assert pending.wait() == tmp_path


def test_a_rank_that_waits_for_a_large_checkpoint_makes_progress_while_its_draft_grows(
    tmp_path: Path,
) -> None:
    """The writer goes on only when the waiting rank has left a mark of what was written so far."""
    draft, marks = tmp_path / "draft", tmp_path / "rank.progress"
    draft.mkdir()
    progress.open_file(marks)
    before = progress.read(marks)[0]

    def work() -> None:
        for number in range(1, 4):
            (draft / f"{number}").write_bytes(b"x" * 1000)
            end = time.monotonic() + 60.0
            while f"{number}000 bytes" not in progress.read(marks)[1]:
                if time.monotonic() > end:
                    raise CheckpointError(f"no mark of {number}000 bytes")
                time.sleep(0.01)

    PendingSave(tmp_path / "step_00000007", work, draft).wait()
    number, text = progress.read(marks)
    assert number >= before + 3 and text.endswith("writing step_00000007: 3000 bytes")
