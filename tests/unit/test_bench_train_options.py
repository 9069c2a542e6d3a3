"""The training benchmark says what is wrong with its command line and its curves before it takes anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
CURVE = {"model": "Qwen3.5-27B", "layers": 4, "tp": 1, "max_tokens": 32768, "train_vision": False}
TEXT_ONLY = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import bench_train

    yield bench_train


@pytest.mark.parametrize(
    ("line", "world_size", "sentence"),
    [
        ("--steps 0", 1, "--steps 0: at least 1"),
        ("--warmup -1", 1, "--warmup -1: at least 0"),
        ("--tp 0", 1, "--tp 0: at least 1"),
        ("--variants all,fast", 1, "--variants: 'fast' is none of all, no packing"),
        ("--out /no/such/folder/rows.jsonl", 1, "--out /no/such/folder/rows.jsonl: give a file in a folder"),
        ("--profile /tmp", 1, "--profile /tmp: give a file"),
        ("--tp 2", 1, "--tp 2 does not divide the 1 processes .*: torchrun --nproc-per-node 2 "),
        ("--tp 3", 3, "tp = 3 does not divide num_key_value_heads = 4 .* of Qwen3.5-27B; legal: 1, 2, 4"),
        ("--ep 2", 2, "ep = 2 needs a model whose experts"),
        ("--layers 65", 1, "--layers 65: Qwen3.5-27B has 64"),
        ("--model nowhere", 1, "--model nowhere: neither a folder nor a config.json"),
        ("--model TEXT", 1, "has no vision tower"),
    ],
)
def test_what_cannot_be_is_a_sentence(
    bench: Any, tmp_path: Path, line: str, world_size: int, sentence: str
) -> None:
    text = tmp_path / "config.json"
    text.write_text(json.dumps(TEXT_ONLY))
    options = bench._parser().parse_args(line.replace("TEXT", str(text)).split())
    with pytest.raises(SystemExit, match=sentence):
        bench.check_options(options, options.variants.split(","), world_size)


def test_what_can_be_passes(bench: Any) -> None:
    for line, world_size in (
        ("", 1),
        ("--tp 2 --recompute full", 2),
        ("--layers 8 --curve 50", 1),
        ("--tiny", 1),
    ):
        options = bench._parser().parse_args(line.split())
        bench.check_options(options, options.variants.split(","), world_size)


def compared(bench: Any, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]) -> int:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, curve in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps({**CURVE, **curve}))
    code: int = bench.compare(*paths)
    return code


@pytest.mark.parametrize(
    ("losses", "code", "words"),
    [
        ([2.0, 1.0], 0, "largest difference 0.00 %"),
        ([2.0, 1.019], 0, "largest difference 1.90 %"),
        ([2.05, 1.0], 1, "from step 1"),
        ([2.0, 1.03], 1, "3.00 % of the loss, at 2% or more from step 2"),
        ([2.0, float("nan")], 1, "not a number at step 2"),
        ([float("nan"), 1.0], 1, "not a number at step 1"),
    ],
)
def test_curves_agree_only_where_every_step_does(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], losses: list[float], code: int, words: str
) -> None:
    assert compared(bench, tmp_path, {"losses": [2.0, 1.0]}, {"losses": losses, "tp": 2}) == code
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ({"losses": [1.0]}, "have 2 and 1 steps"),
        ({"losses": [2.0, 1.0], "layers": 8}, "layers = 4, .* has 8: not the same training"),
        ({"losses": []}, "is no curve: make one with --curve 50"),
    ],
)
def test_curves_of_different_trainings_are_not_compared(
    bench: Any, tmp_path: Path, second: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SystemExit, match=sentence):
        compared(bench, tmp_path, {"losses": [2.0, 1.0]}, second)


def test_a_file_that_is_not_there_or_no_curve_is_named(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"a\.json cannot be read: No such file"):
        bench.compare(tmp_path / "a.json", tmp_path / "a.json")
    (tmp_path / "a.json").write_text("not JSON")
    with pytest.raises(SystemExit, match=r"a\.json is no curve"):
        bench.compare(tmp_path / "a.json", tmp_path / "a.json")


def test_fewer_layers_are_the_first_ones(bench: Any) -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = {"text_config": {"num_hidden_layers": 8, "layer_types": kinds * 2}, "model_type": "qwen3_5"}
    assert bench.with_layers(config, 4)["text_config"] == {"num_hidden_layers": 4, "layer_types": kinds}
    assert config["text_config"]["num_hidden_layers"] == 8
