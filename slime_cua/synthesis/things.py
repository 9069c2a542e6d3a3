"""Things on generated screens: what they are, and how each is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from pydantic import Field

from slime_cua.config.base import ConfigModel
from slime_cua.synthesis import canvas
from slime_cua.synthesis.canvas import Box, Rgb
from slime_cua.synthesis.starter import vocabulary

T = TypeVar("T")

COLOURS: dict[str, Rgb] = {
    name: (int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16))
    for name, code in {**vocabulary.COLOURS, **vocabulary.CONTROL_COLOURS}.items()
}
HUES = tuple(vocabulary.COLOURS)
WORDS = (*vocabulary.WORDS, *vocabulary.FILES, *vocabulary.FOLDERS, "ok", "done", "close", "save")
Kind = Literal["button", "circle", "square", "triangle", "cross", "box", "field"]


class Look(ConfigModel):
    """What the screens of one stage of a curriculum look like."""

    num_items: tuple[int, int] = (1, 8)
    """Fewest and most things on a screen."""
    side_px: tuple[int, int] = (36, 200)
    """Shortest and longest side of a thing."""
    kinds: tuple[Kind, ...] = ("button", "circle", "square", "triangle", "cross", "box", "field")
    are_colors_distinct: bool = False
    """Each thing has a colour of its own, so that no more than six are shown."""
    window_share: float = Field(0.7, ge=0, le=1)
    """Share of the screens that have windows; the others are a bare desktop."""
    dark_share: float = Field(0.35, ge=0, le=1)
    word_share: float = Field(0.5, ge=0, le=1)
    """Share of the buttons, boxes and fields that carry a word."""
    num_words: int = Field(len(WORDS), ge=1, le=len(WORDS))
    """How many of `WORDS` occur, from the front."""
    word_px: tuple[int, int] = (17, 34)
    """Smallest and largest text on things."""
    number_share: float = Field(0.0, ge=0, le=1)
    """Share of these words that are whole numbers from 0 to 99."""
    label_share: float = Field(0.0, ge=0, le=1)
    """Share of the wide fields that have a word beside them."""


@dataclass(frozen=True)
class Item:
    """One thing on a screen, e.g. Item("button", "red", "cat", (40, 60, 140, 110))."""

    kind: Kind
    color: str
    """A name of COLOURS, or "" for greys."""
    word: str
    box: Box
    """What a click must hit, pixels."""
    is_ticked: bool = False
    label: str = ""
    """The word beside a field, which names it."""

    @property
    def center(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2

    @property
    def area(self) -> int:
        return (self.box[2] - self.box[0]) * (self.box[3] - self.box[1])


@dataclass(frozen=True)
class Theme:
    """Colours and habits of one screen."""

    desk: Rgb
    body: Rgb
    bar: Rgb
    text: Rgb
    grey: Rgb
    radius_px: int
    border_px: int
    is_bold: bool


def make_theme(rng: np.random.Generator, is_dark: bool) -> Theme:
    """A random theme; half of the light ones take a pale background of the starter tasks' palette."""
    if is_dark:
        tones = (
            _grey(rng, 10, 60),
            _grey(rng, 24, 70),
            _grey(rng, 10, 90),
            (235, 235, 235),
            _grey(rng, 75, 115),
        )
    else:
        tones = (
            _grey(rng, 150, 245),
            _grey(rng, 205, 255),
            _grey(rng, 120, 235),
            (24, 24, 24),
            _grey(rng, 160, 235),
        )
    return Theme(
        *tones,
        radius_px=between(rng, -8, 10),
        border_px=between(rng, 0, 3) if rng.random() < 0.85 else between(rng, 4, 7),
        is_bold=bool(rng.random() < 0.6),
    )


def pick(rng: np.random.Generator, options: tuple[T, ...]) -> T:
    """One of `options`, each equally likely."""
    return options[int(rng.random() * len(options))]


def between(rng: np.random.Generator, low: int, high: int) -> int:
    """A whole number from `low` to `high`, both included; `low` if the range is empty."""
    return low + int(rng.random() * (max(low, high) + 1 - low))


def shade(rng: np.random.Generator, rgb: Rgb, spread: int = 16) -> Rgb:
    """`rgb` with each part moved by at most `spread`."""
    red, green, blue = (
        min(max(part + int(move), 0), 255)
        for part, move in zip(rgb, rng.integers(-spread, spread + 1, 3), strict=True)
    )
    return red, green, blue


def mix(first: Rgb, second: Rgb, share: float) -> Rgb:
    """`first` moved towards `second` by `share`."""
    red, green, blue = (int(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


def ink_on(under: Rgb) -> Rgb:
    """Black or white, whichever is easier to read on `under`."""
    brightness = (299 * under[0] + 587 * under[1] + 114 * under[2]) / 1000
    return (16, 16, 16) if brightness > 130 else (250, 250, 250)


def center_text(pixels: np.ndarray, box: Box, words: str, size_px: int, rgb: Rgb, is_bold: bool) -> None:
    """Write `words` in the middle of `box`."""
    width, height = canvas.text_size(words, size_px, is_bold)
    x0, y0 = (box[0] + box[2] - width) // 2, (box[1] + box[3] - height) // 2
    canvas.text(pixels, (x0, y0), words, size_px, rgb, is_bold)


def draw_item(
    rng: np.random.Generator, pixels: np.ndarray, theme: Theme, box: Box, look: Look, color: str | None = None
) -> Item:
    """Draw a random thing into `box`; returns it with the box that it really takes. color: None draws one."""
    kind = pick(rng, look.kinds)
    if color is None:
        color = _draw_color(rng)
    if kind == "button":
        return _draw_button(rng, pixels, theme, box, color, look)
    if kind == "box":
        return _draw_check_box(rng, pixels, theme, box, look)
    if kind == "field":
        return _draw_field(rng, pixels, theme, box, color, look)
    return _draw_symbol(rng, pixels, theme, box, color, kind)


def _draw_color(rng: np.random.Generator) -> str:
    if rng.random() < 0.1:
        return ""
    return pick(rng, HUES) if rng.random() < 0.8 else pick(rng, tuple(vocabulary.CONTROL_COLOURS))


def _grey(rng: np.random.Generator, low: int, high: int) -> Rgb:
    level = between(rng, low, high)
    return shade(rng, (level, level, level), 6)


def _edge(theme: Theme, rgb: Rgb) -> Rgb:
    """Colour of an outline: dark on light themes, and light around dark things on dark ones."""
    return (
        mix(rgb, (255, 255, 255), 0.5)
        if max(theme.body) < 100 and max(rgb) < 100
        else mix(rgb, (0, 0, 0), 0.6)
    )


def _inset(box: Box, by_px: int) -> Box:
    return box[0] + by_px, box[1] + by_px, box[2] - by_px, box[3] - by_px


def _panel(pixels: np.ndarray, theme: Theme, box: Box, rgb: Rgb) -> None:
    """A filled box with the theme's outline and corners."""
    if theme.radius_px > 2:
        canvas.rounded(pixels, box, _edge(theme, rgb), theme.radius_px)
        canvas.rounded(pixels, _inset(box, max(theme.border_px, 1)), rgb, theme.radius_px)
    else:
        canvas.fill(pixels, box, rgb)
        canvas.frame(pixels, box, _edge(theme, rgb), theme.border_px)


def _draw_button(
    rng: np.random.Generator, pixels: np.ndarray, theme: Theme, box: Box, color: str, look: Look
) -> Item:
    rgb = shade(rng, COLOURS[color]) if color else shade(rng, theme.grey, 10)
    _panel(pixels, theme, box, rgb)
    word = ""
    if rng.random() < look.word_share:
        size_px = between(rng, *look.word_px)
        word = _fitting_word(rng, box, size_px, theme.is_bold, look)
        center_text(pixels, box, word, size_px, ink_on(rgb), theme.is_bold)
    return Item("button", color, word, box)


def _draw_symbol(
    rng: np.random.Generator, pixels: np.ndarray, theme: Theme, box: Box, color: str, kind: Kind
) -> Item:
    """A shape by itself, or a shape on a white button, which then is what a click must hit."""
    x0, y0, x1, y1 = box
    side = min(x1 - x0, y1 - y0)
    hit = inner = (x0, y0, x0 + side, y0 + side)
    is_on_button = side >= 48 and rng.random() < 0.4 and color != "white"
    if is_on_button:
        hit = box
        _panel(pixels, theme, box, (255, 255, 255))
        gap = between(rng, 6, side // 5)
        left, top = (x0 + x1 - side) // 2, (y0 + y1 - side) // 2
        inner = (left + gap, top + gap, left + side - gap, top + side - gap)
    rgb = shade(rng, COLOURS[color]) if color else theme.grey
    draw = {"circle": canvas.disc, "triangle": canvas.triangle, "cross": canvas.plus, "square": canvas.fill}[
        kind
    ]
    outline_px = theme.border_px if rng.random() < 0.7 else 0
    if outline_px:
        draw(pixels, inner, _edge(theme, rgb))
    if kind == "triangle" and outline_px:
        draw(
            pixels,
            (
                inner[0] + 2 * outline_px,
                inner[1] + 2 * outline_px,
                inner[2] - 2 * outline_px,
                inner[3] - outline_px,
            ),
            rgb,
        )
    else:
        draw(pixels, _inset(inner, outline_px), rgb)
    return Item(kind, color, "", hit)


def _draw_check_box(rng: np.random.Generator, pixels: np.ndarray, theme: Theme, box: Box, look: Look) -> Item:
    x0, y0, x1, y1 = box
    side = min(x1 - x0, y1 - y0, 96)
    square = hit = (x0, y0, x0 + side, y0 + side)
    canvas.fill(pixels, square, (255, 255, 255))
    canvas.frame(pixels, square, (40, 40, 40), max(theme.border_px, 2))
    is_ticked = bool(rng.random() < 0.5)
    if is_ticked:
        canvas.tick(pixels, _inset(square, side // 5), (32, 32, 32))
    label = ""
    if rng.random() < look.word_share:
        size_px = between(rng, *look.word_px)
        label = _fitting_word(rng, (x0 + side + 6, y0, x1, y1), size_px, theme.is_bold, look)
    if label:
        top = y0 + (side - canvas.text_size(label, size_px)[1]) // 2
        reach = canvas.text(pixels, (x0 + side + 6, top), label, size_px, theme.text, theme.is_bold)
        hit = (x0, y0, reach[2], y0 + side)
    return Item("box", "", label, hit, is_ticked)


def _draw_field(
    rng: np.random.Generator, pixels: np.ndarray, theme: Theme, box: Box, color: str, look: Look
) -> Item:
    """A white field; coloured ones have a coloured margin. A label, if any, stands to its left."""
    size_px = between(rng, *look.word_px)
    label = ""
    if box[2] - box[0] >= 120 and rng.random() < look.label_share:
        half = (box[0] + box[2]) // 2
        label = _fitting_word(rng, (box[0], box[1], half, box[3]), size_px, theme.is_bold, look, False)
        if label:
            width, height = canvas.text_size(label, size_px, theme.is_bold)
            spot = (half - width - 6, (box[1] + box[3] - height) // 2)
            canvas.text(pixels, spot, label, size_px, ink_on(theme.body), theme.is_bold)
            box = (half, *box[1:])
    inner = box
    if color in HUES and min(box[2] - box[0], box[3] - box[1]) >= 48:
        _panel(pixels, theme, box, shade(rng, COLOURS[color]))
        inner = _inset(box, 8)
    else:
        color = ""
    canvas.fill(pixels, inner, (255, 255, 255))
    canvas.frame(pixels, inner, (90, 90, 90), 1)
    word = _fitting_word(rng, inner, size_px, theme.is_bold, look) if rng.random() < look.word_share else ""
    top = (inner[1] + inner[3] - canvas.text_size("x", size_px)[1]) // 2
    canvas.text(pixels, (inner[0] + 6, top), word, size_px, (20, 20, 20), theme.is_bold)
    return Item("field", color, word, box, label=label)


def _fitting_word(
    rng: np.random.Generator, box: Box, size_px: int, is_bold: bool, look: Look, may_be_number: bool = True
) -> str:
    """A word or number that fits into `box`, or "" if the first three drawn do not."""
    for _ in range(3):
        is_number = may_be_number and rng.random() < look.number_share
        word = str(between(rng, 0, 99)) if is_number else WORDS[between(rng, 0, look.num_words - 1)]
        width, height = canvas.text_size(word, size_px, is_bold)
        if width <= box[2] - box[0] - 8 and height <= box[3] - box[1] + 2:
            return word
    return ""
