"""The closed vocabulary and the look of the starter tasks.

A tokenizer for a tiny policy takes every string of `all_tokens()` as one token; a generator of pretraining screens may
use the same colours and sizes. Nothing here is an instance of a task.
"""

from __future__ import annotations

SCREEN_WH_PX = (640, 384)
"""Desktop size that the layouts are made for."""

TOP_PX = 32
"""Nothing to click lies above this line: a window manager may draw a title bar there."""

MIN_SIDE_PX = 64
"""Smallest side of anything to be clicked."""

GRID_STEP = 20
"""Demonstrated positions are multiples of this on the 0..1000 grid; the tiny base policy learned the same steps."""

COLOURS: dict[str, str] = {
    "red": "#d62222",
    "green": "#1f9e35",
    "blue": "#1f4fd6",
    "yellow": "#f2d21f",
    "purple": "#8a2fc4",
    "orange": "#f58a1f",
}
"""Name in instructions -> colour on screen."""

CONTROL_COLOURS: dict[str, str] = {"black": "#202020", "white": "#ffffff"}
"""Controls (done, ok, close) are black; fields, boxes and symbol buttons are white. Theme names dark and light, too."""

BACKGROUNDS: tuple[str, ...] = ("#e9e9e9", "#dfe6e6", "#ece6da", "#d9d9e3", "#f4f4f4", "#cfd6cf")
"""Pale window backgrounds; one an instance."""

SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "cross")
PLACES: tuple[str, ...] = ("left", "right", "top", "bottom")
SIZES: tuple[str, ...] = ("big", "small")
THEMES: tuple[str, ...] = ("dark", "light")
ANSWERS: tuple[str, ...] = ("yes", "no")
NUMBERS: tuple[str, ...] = ("1", "2", "3", "4", "5", "6")

WORDS: tuple[str, ...] = ("cat", "dog", "sun", "moon", "tree", "fish", "bird", "cup", "hat", "key")
"""What is typed and written."""

FILES: tuple[str, ...] = ("note", "list", "plan", "map", "page", "card")
"""File names, all in the home folder."""

FOLDERS: tuple[str, ...] = ("bag", "case", "desk")

INSTRUCTION_WORDS: tuple[str, ...] = (
    "press", "the", "button", "one", "tick", "and", "then", "done", "close", "answer", "window", "in", "type",
    "field", "ok", "write", "to", "file", "files", "rename", "delete", "copy", "count", "number", "of", "color",
    "shape", "shapes", "on", "editor", "save", "replace", "all", "with", "use", "theme",
)  # fmt: skip
"""Words that carry the instructions; all are lower case."""

PUNCTUATION: tuple[str, ...] = (".", ",")

KEYS: tuple[str, ...] = ("ctrl", "s", "a", "enter")

HINTS: tuple[str, ...] = tuple("bcdfghjklmnprtvwxz")
"""Letters of the hints: each thing of a board carries one, and the key of that letter does what a click on it does."""

CODE_PIECES: tuple[str, ...] = (
    "echo ", " > ~/", "mv ~/", "rm ~/", "cp ~/", " ~/", "ls ~/", " | wc -l > ~/",
    "from pathlib import Path; (Path.home() / '", "').write_text('", "').rename(Path.home() / '",
    "').unlink()", "')",
)  # fmt: skip
"""Pieces of the programs in the demonstrations, exact to the blank; between them stand words, names and numbers."""


QUESTION_WORDS: tuple[str, ...] = (
    "point", "where", "what", "which", "is", "there", "how", "many", "word", "read", "pointer", "front", "ticked",
    "empty", "size", "place", "or", "not", "a", "?", ":", "=",
)  # fmt: skip
"""Words of the questions about generated pretraining screens; no instruction needs them."""


def instruction_tokens() -> tuple[str, ...]:
    """Every word and mark that occurs in an instruction, each once, in a fixed order."""
    groups = (
        INSTRUCTION_WORDS,
        tuple(COLOURS),
        SHAPES,
        PLACES,
        SIZES,
        THEMES,
        ANSWERS,
        WORDS,
        FILES,
        FOLDERS,
        PUNCTUATION,
    )
    return tuple(dict.fromkeys(word for group in groups for word in group))


def coordinate_tokens() -> tuple[str, ...]:
    """Every coordinate of a demonstration: "0", "20", ... "1000"."""
    return tuple(str(value) for value in range(0, 1001, GRID_STEP))


def all_tokens() -> tuple[str, ...]:
    """Everything that an instruction, a demonstrated action (besides its grammar) or a pretraining question contains."""
    groups = (
        instruction_tokens(),
        NUMBERS,
        KEYS,
        CODE_PIECES,
        coordinate_tokens(),
        tuple(CONTROL_COLOURS),
        QUESTION_WORDS,
    )
    return tuple(dict.fromkeys(word for group in groups for word in group))
