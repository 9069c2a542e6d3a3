"""Build the tokenizer of models/tiny_base: python scripts/make_tiny_tokenizer.py [FOLDER].

Every token is chosen, none is learned, so the output is the same on each machine. Text is cut by one regular expression
into literals of the tool call (longest first), whole numbers 0..1000, words, and single characters; a piece that the
vocabulary holds is one token, any other piece becomes its UTF-8 bytes, so every text round-trips. A space is a token of its
own: a word has one token wherever it stands, which a small model learns far sooner. No literal may swallow a word that a
request can hold ("cat ", " in "): the policy could not copy it. A click costs nine tokens.

Ids are stable when words are appended: marks come first, the starter tasks' words last, reserved tokens fill the rest.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from slime_cua.synthesis.starter.vocabulary import all_tokens

VOCAB_SIZE = 3072
"""Rows of the embedding: a multiple of 128, so that tensor parallelism needs no padding of its own."""
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
)
SPECIAL += ("<|image_pad|>", "<|video_pad|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens with a meaning that are still text: decoding keeps them."""
ACTIONS = (
    "key type mouse_move left_click left_click_drag right_click middle_click double_click triple_click scroll"
)
ACTIONS += " hscroll wait terminate code screenshot"
CALL = '{"name": "custom_computer_use", "arguments": {"action": "'
LITERALS = (
    *ACTIONS.split(),
    *(opening + CALL for opening in ("", "\n")),
    *('", "coordinate": [', '", "text": "', '", "keys": ["', '", "pixels": ', '", "time": ', '", "status": "'),
    *('", "language": "', '", "execute_code": "', '], "pixels": ', '], "text": "', '], "keys": ["', ', "pixels": '),
    *('], "coordinate": [', '", "start_coordinate": [', '{"name": "', '", "arguments": {', '{"', '": "', '": ', '"}'),
    *(closing + end for closing in ("}}", ']}}', '"}}', '"]}}') for end in ("", "\n")),
    *(", ", '", "', "', '", '\\"', "\\n", "\\n\\n", "\\t", "\\\\", "\n\n", "  ", "    ", "        "),
    *("system\n", "user\n", "assistant\n", "[screenshot]", "custom_computer_use", "execute_code"),
    *("/home/user/", "/home/user", "('", "')", "(['", "'])", '(\\"', '\\")', "()", "():", "):", ".py", ".txt", ".json", ".csv"),
    *("print(", "open('", "subprocess.run([", "subprocess.run('", ".read()", ".write('", ".write(", " = ", " == ", " += "),
    *("with open('", "', 'w')", "', 'a')", " as f:\\n", "f.write('", "json.load(", "json.dump(", "f.read()"),
    *("from pathlib import Path", "Path('", ".write_text('", ".read_text()", "echo ", " > ", " >> ", " && ", " | ", "--", "://"),
    *(".\n", ":\n", ". ", ": ", "...", "->", "=>", "!=", "<=", ">=", "**", "//"),
)  # fmt: skip
NUMBER = "1000|[1-9][0-9]{0,2}|0"
WORD = r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])"


def byte_text(text: str) -> str:
    """`text` in the byte-level alphabet: one printable character a UTF-8 byte."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in level.pre_tokenize_str(text))


def words(path: Path) -> list[str]:
    """The words of the file, each followed by its capitalised form, without repeats."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = dict.fromkeys(form for word in " ".join(lines).split() for form in (word, word.capitalize()))
    return [word for word in found if re.fullmatch(WORD, word) and len(word) > 1]


def build(word_file: Path) -> Tokenizer:
    """The tokenizer, with exactly VOCAB_SIZE tokens."""
    starter = all_tokens()
    literals = tuple(dict.fromkeys((*LITERALS, *(piece for piece in starter if not _is_word(piece)))))
    pieces = [
        *SPECIAL,
        *MARKUP,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(str(number) for number in range(1001)),
        *(byte_text(literal) for literal in LITERALS),
        *words(word_file),
        *(byte_text(piece) for piece in starter),
    ]
    pieces = list(dict.fromkeys(pieces))
    reserved = VOCAB_SIZE - len(pieces)
    if reserved < 0:
        raise ValueError(
            f"{-reserved} tokens too many: shorten {word_file} or raise VOCAB_SIZE by a multiple of 128"
        )
    unused = [f"<|reserved_{index}|>" for index in range(reserved)]
    vocab = {piece: index for index, piece in enumerate([*pieces, *unused])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    alternatives = "|".join(
        _escape(literal) for literal in sorted(literals, key=lambda piece: (-len(piece), piece))
    )
    cut = Regex(f"{alternatives}|{NUMBER}|{WORD}|[\\s\\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(cut, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in (*SPECIAL, *unused)]
    )
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in MARKUP])
    return tokenizer


def _is_word(piece: str) -> bool:
    return re.fullmatch(f"{NUMBER}|{WORD}", piece) is not None


def _escape(literal: str) -> str:
    """`literal` for the regular expressions of `tokenizers`; a literal that is a word does not match inside a longer one."""
    pattern = re.sub(r"([\\\[\]{}()|.*+?^$/])", r"\\\1", literal).replace("\n", "\\n")
    before = "(?<![A-Za-z_])" if literal[0].isalpha() else ""
    after = "(?![A-Za-z_])" if literal[-1].isalpha() else ""
    return before + pattern + after


def main(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build(Path(__file__).with_name("tiny_words.txt"))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen3VLProcessor",
        "model_max_length": 16384,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{folder}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the tokenizer of the tiny policy.")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(__file__).parents[1] / "models" / "tiny_base"
    )
    main(parser.parse_args().folder)
