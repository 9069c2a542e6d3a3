"""The base policy that ships: it sees, points and carries words on screens that it was never shown. Runs in transformers on CPU."""

import json
from pathlib import Path

import pytest

from slime_cua.config.base import load
from slime_cua.evaluation import answers, pointing
from slime_cua.synthesis.pretrain import PretrainConfig

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny_base"
WEIGHTS = TINY / "model.safetensors"
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "tiny_base_gate.json"
"""python -m slime_cua.evaluation.pointing models/tiny_base --num 300 --num-blank 100 --device cuda --json THIS."""
ANSWERS = GOLDEN.with_name("tiny_base_answers.json")
"""python -m slime_cua.evaluation.answers models/tiny_base --num 512 --device cuda --json THIS."""
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "pretrain_tiny_base.yaml"
MAX_BYTES = 15_000_000

pytestmark = pytest.mark.skipif(not WEIGHTS.is_file(), reason="models/tiny_base has no weights yet")


@pytest.fixture(scope="module")
def answerer() -> pointing.Answerer:
    return pointing.Answerer(TINY)


def find(name: str) -> pointing.Test:
    return next(test for test in pointing.TESTS if test.name == name)


def test_the_weights_are_small_enough_to_ship():
    assert WEIGHTS.stat().st_size <= MAX_BYTES


def test_six_buttons_by_colour_are_hit_and_blanked_images_are_at_chance(answerer):
    result = pointing.measure(answerer, find("six buttons by colour"), num=120, num_blank=60)
    assert result.rate >= 0.95, result
    assert result.blank is not None and result.blank <= result.chance, result


def test_the_published_table_is_what_these_weights_give(answerer):
    rows = {row["name"]: row for row in json.loads(GOLDEN.read_text())}
    for name in ("mixed: point_shape", "mixed: point_place", "mixed: theme"):
        found = pointing.measure(answerer, find(name), num=40)
        assert rows[name]["low"] - 0.1 <= found.rate <= min(rows[name]["high"] + 0.1, 1.0), (name, found)


def test_words_of_a_request_are_carried_past_a_screen():
    rows = {row["kind"]: row for row in json.loads(ANSWERS.read_text())}
    stage = load(PretrainConfig, RECIPE).stages[-1]
    found = {rate.kind: rate for rate in answers.measure(TINY, stage, num=32)}
    for kind in ("carry", "done"):
        assert rows[kind]["low"] - 0.15 <= found[kind].rate, found[kind]
