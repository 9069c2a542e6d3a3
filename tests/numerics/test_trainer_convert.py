"""The conversion commands give a folder back byte for byte, at another TP than it went in."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_cua.launch.convert import main
from tests.numerics.tiny_models import HYBRID, make_qwen35

pytestmark = pytest.mark.slow


def test_hugging_face_to_megatron_at_tp2_and_back_at_tp1_is_byte_equal(tmp_path: Path) -> None:
    source = make_qwen35(tmp_path / "source", HYBRID, is_tied=False)
    assert main(["to-megatron", "--hf", str(source), "--out", str(tmp_path / "run"), "--tp", "2"]) == 0
    back = ["--checkpoint", str(tmp_path / "run"), "--hf", str(source), "--out", str(tmp_path / "back")]
    assert main(["to-hf", *back]) == 0
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == files
