"""The tokenizer that ships with the tiny policy."""

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from slime_cua.synthesis.starter.vocabulary import all_tokens

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "models" / "tiny_base"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
CLICK = '<tool_call>\n{"name": "custom_computer_use", "arguments": {"action": "left_click", "coordinate": [500, 250]}}\n</tool_call>'


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_a_click_is_nine_tokens_with_each_coordinate_one_of_them() -> None:
    tokens = TOKENIZER.encode(CLICK).tokens
    assert len(tokens) == 9
    assert tokens[4] == "500" and tokens[6] == "250"


@pytest.mark.parametrize("number", [0, 7, 10, 99, 100, 999, 1000])
def test_whole_numbers_of_the_grid_are_one_token(number: int) -> None:
    assert TOKENIZER.encode(str(number)).tokens == [str(number)]


def test_every_token_of_the_starter_tasks_is_one_token_wherever_it_stands() -> None:
    for piece in all_tokens():
        alone = TOKENIZER.encode(piece).ids
        assert len(alone) == 1, piece
        assert alone[0] in TOKENIZER.encode(f' "{piece}"').ids, piece


def test_config_names_the_token_ids_of_the_tokenizer() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["image_token_id"] == TOKENIZER.token_to_id("<|image_pad|>")
    assert config["vision_start_token_id"] == TOKENIZER.token_to_id("<|vision_start|>")
    assert config["text_config"]["vocab_size"] == TOKENIZER.get_vocab_size()
    assert config["text_config"]["eos_token_id"] == TOKENIZER.token_to_id("<|im_end|>")


@pytest.mark.parametrize("script", ["make_tiny_tokenizer", "make_tiny_config"])
def test_the_shipped_files_are_what_the_scripts_write(script: str, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location(script, ROOT / "scripts" / f"{script}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    module.main(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (FOLDER / path.name).read_bytes(), path.name
