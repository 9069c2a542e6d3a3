"""`slime-cua convert` replaces a Hugging Face folder, and nothing else that is there."""

from pathlib import Path

import pytest

from slime_cua.core.errors import CheckpointError
from slime_cua.launch.convert import main


@pytest.mark.parametrize("name", ["mine.txt", "config.json"])
def test_a_folder_of_other_files_is_not_replaced(tmp_path: Path, name: str):
    (tmp_path / name).write_text("precious")
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds files .* give a new or an empty folder"):
        main(["to-hf", "--checkpoint", "runs/start", "--hf", "models/tiny_base", "--out", str(tmp_path)])
    assert (tmp_path / name).read_text() == "precious"


@pytest.mark.parametrize("way", [["to-hf", "--checkpoint", "runs/start"], ["to-megatron"]])
def test_a_file_is_not_moved_away(tmp_path: Path, way: list[str]):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="is a file: give a folder"):
        main([*way, "--hf", "models/tiny_base", "--out", str(tmp_path / "mine.txt")])
    assert (tmp_path / "mine.txt").read_text() == "precious"
