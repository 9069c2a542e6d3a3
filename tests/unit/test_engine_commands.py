"""Command lines of SGLang servers, and engine settings that a run must not start with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollout.engines.commands import sglang_command
from slime_cua.config.rollout import EngineConfig

TINY = Path("models/tiny_base")


def command(model: Path, **settings: object) -> list[str]:
    return sglang_command(EngineConfig(kind="sglang", **settings), model, "127.0.0.1", 30000, 7)


def folder(tmp_path: Path, model_type: str, layer_types: list[str]) -> Path:
    text = {"model_type": model_type, "layer_types": layer_types}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    return tmp_path


def test_a_qwen35_without_recurrent_layers_gets_its_number_of_states() -> None:
    assert "--max-mamba-cache-size=40" in command(TINY, max_batch=8)


@pytest.mark.parametrize(
    ("model_type", "layer_types"),
    [("qwen3_5_text", ["linear_attention", "full_attention"]), ("qwen3_vl_text", ["full_attention"])],
)
def test_other_models_are_sized_by_sglang(tmp_path: Path, model_type: str, layer_types: list[str]) -> None:
    flags = command(folder(tmp_path, model_type, layer_types))
    assert not any("mamba" in flag for flag in flags)


@pytest.mark.parametrize(("wanted", "given"), [(32768, 16384), (4096, 4096)])
def test_no_more_context_is_asked_for_than_the_model_has(
    wanted: int, given: int, caplog: pytest.LogCaptureFixture
) -> None:
    """models/tiny_base has 16,384 positions; SGLang refuses to start with more."""
    assert f"--context-length={given}" in command(TINY, max_context_tokens=wanted)
    assert ("has 16384 positions" in caplog.text) == (given < wanted)


def test_extra_arguments_come_last_so_that_they_win() -> None:
    flags = command(TINY, extra_args=("--max-mamba-cache-size=9",), dtype="bf16")
    assert flags[-1] == "--max-mamba-cache-size=9"
    assert {"--dtype=bfloat16", "--weight-version=7", "--port=30000"} <= set(flags)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "sglang", "extra_args": ("--enable-deterministic-inference",)}, "episodes of a group"),
        ({"kind": "external"}, "needs urls"),
        ({"kind": "embedded", "urls": ("http://127.0.0.1:1",)}, "need kind = external"),
    ],
)
def test_settings_that_would_train_on_wrong_samples_or_none_are_refused(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        EngineConfig(**settings)
