"""Random screens that resemble simple desktops: windows, buttons, check boxes, fields, shapes, words, a pointer.

A screen knows what it shows, so questions with certain answers can be asked about it (`synthesis.questions`). Screens are
drawn from a random generator alone: nothing is read from tasks, and no task is ever drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slime_cua.synthesis import canvas
from slime_cua.synthesis.canvas import Box
from slime_cua.synthesis.starter import vocabulary
from slime_cua.synthesis.things import (
    COLOURS,
    HUES,
    WORDS,
    Item,
    Look,
    Theme,
    between,
    center_text,
    draw_item,
    ink_on,
    make_theme,
    mix,
    pick,
    shade,
)

SCREEN_WH_PX = vocabulary.SCREEN_WH_PX


@dataclass(frozen=True)
class Window:
    """A window, e.g. Window((0, 0, 640, 384), color="", close=(612, 2, 636, 26))."""

    box: Box
    color: str
    """Colour of its body, "" for the theme's."""
    close: Box
    """Its close button."""


@dataclass
class Screen:
    """A drawn screen and what is on it."""

    pixels: np.ndarray
    """uint8 [height, width, 3]."""
    is_dark: bool
    items: list[Item] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    """Back to front; things are in the front one."""
    pointer: tuple[int, int] | None = None
    """Tip of the pointer, pixels."""


def make_screen(rng: np.random.Generator, look: Look) -> Screen:
    """A random screen in the given look; the same state of `rng` gives the same screen."""
    width, height = SCREEN_WH_PX
    is_dark = bool(rng.random() < look.dark_share)
    theme = make_theme(rng, is_dark)
    pixels = np.empty((height, width, 3), np.uint8)
    canvas.fill(pixels, (0, 0, width, height), theme.desk)
    screen = Screen(pixels, is_dark)
    room = _draw_windows(rng, screen, theme, look)
    colours = [str(name) for name in rng.permutation(list(HUES))] if look.are_colors_distinct else []
    num_items = between(rng, *look.num_items)
    for box in _places(rng, room, min(num_items, len(colours) or num_items), look):
        color = colours.pop() if look.are_colors_distinct else None
        screen.items.append(draw_item(rng, pixels, theme, box, look, color))
    if rng.random() < 0.5:
        screen.pointer = between(rng, 0, width - 12), between(rng, 0, height - 17)
        canvas.pointer(pixels, *screen.pointer)
    return screen


def _draw_windows(rng: np.random.Generator, screen: Screen, theme: Theme, look: Look) -> Box:
    """Draw no window, one over the whole screen, or some on top of each other; return the room for things."""
    width, height = SCREEN_WH_PX
    if rng.random() >= look.window_share:
        return 4, 4, width - 4, height - 4
    room: Box = (0, 0, width, height)
    if rng.random() < 0.7:
        room = _draw_window(rng, screen, theme, room, "")
        if rng.random() < 0.7:
            return room
    colours = [str(name) for name in rng.permutation(list(HUES))]
    num_windows = between(rng, 1, 3)
    for number in range(num_windows):
        w, h = between(rng, 260, 600), between(rng, 170, 350)
        x0, y0 = between(rng, 0, width - w), between(rng, 0, height - h)
        is_coloured = number < num_windows - 1 and rng.random() < 0.4
        room = _draw_window(
            rng, screen, theme, (x0, y0, x0 + w, y0 + h), colours[number] if is_coloured else ""
        )
    return room


def _draw_window(rng: np.random.Generator, screen: Screen, theme: Theme, box: Box, color: str) -> Box:
    """Draw a window with title bar and close button; return the room inside."""
    x0, y0, x1, y1 = box
    bar_px = between(rng, 18, 36)
    body = shade(rng, COLOURS[color]) if color else shade(rng, theme.body, 6)
    canvas.fill(screen.pixels, box, body)
    canvas.fill(screen.pixels, (x0, y0, x1, y0 + bar_px), theme.bar)
    canvas.frame(screen.pixels, box, mix(theme.bar, theme.text, 0.5), between(rng, 1, 3))
    if rng.random() < 0.5:
        size_px = min(bar_px - 4, 20)
        center_text(
            screen.pixels,
            (x0, y0, x1, y0 + bar_px),
            pick(rng, WORDS),
            size_px,
            ink_on(theme.bar),
            theme.is_bold,
        )
    side = bar_px - 4
    close = (x1 - side - 4, y0 + 2, x1 - 4, y0 + 2 + side)
    if rng.random() < 0.5:
        side = between(rng, 24, 72)
        close = (x1 - side - 6, y0 + bar_px + 4, x1 - 6, y0 + bar_px + 4 + side)
        canvas.fill(screen.pixels, close, (32, 32, 32))
    ink = ink_on(theme.bar) if close[1] < y0 + bar_px else (255, 255, 255)
    gap = max(side // 5, 3)
    arms = (close[0] + gap, close[1] + gap, close[2] - gap, close[3] - gap)
    canvas.saltire(screen.pixels, arms, ink, thick_px=max(side // 8, 2))
    screen.windows.append(Window(box, color, close))
    return x0 + 4, max(y0 + bar_px, close[3]) + 4, x1 - 4, y1 - 4


def _places(rng: np.random.Generator, room: Box, num: int, look: Look) -> list[Box]:
    """Up to `num` boxes inside `room` that do not touch: cells of a random lattice, boxes anywhere in their cells.

    In a room too low for the look's least side, boxes are as high as the room."""
    x0, y0, x1, y1 = room
    low, high = look.side_px
    most_columns, most_rows = max((x1 - x0) // (low + 8), 1), max((y1 - y0) // (low + 8), 1)
    lattices = [
        (columns, rows)
        for columns in range(1, min(most_columns, 6) + 1)
        for rows in range(1, min(most_rows, 5) + 1)
        if columns * rows >= num
    ] or [(most_columns, most_rows)]
    columns, rows = lattices[int(rng.integers(len(lattices)))]
    cell_w, cell_h = (x1 - x0) // columns, (y1 - y0) // rows
    boxes = []
    for cell in rng.permutation(columns * rows)[:num]:
        w = between(rng, min(low, cell_w - 8), min(high, cell_w - 8))
        h = between(rng, min(low, cell_h - 8), min(high, cell_h - 8))
        if w < h <= cell_w - 8 and rng.random() < 0.6:
            w, h = h, w
        left = x0 + int(cell % columns) * cell_w + 4
        top = y0 + int(cell // columns) * cell_h + 4
        left += between(rng, 0, cell_w - 8 - w)
        top += between(rng, 0, cell_h - 8 - h)
        boxes.append((left, top, left + w, top + h))
    return boxes
