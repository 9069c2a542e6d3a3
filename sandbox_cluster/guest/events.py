"""Input as a flat list of events: what every provider can play, whoever asked for it.

GUI actions of a policy and pyautogui commands of OSWorld both compile to it, so there is one way to move a mouse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sandbox_cluster.guest.keys import check_key
from slime_cua.core.actions import GuiAction
from slime_cua.core.coordinates import to_pixels

LEFT, MIDDLE, RIGHT, WHEEL_UP, WHEEL_DOWN, WHEEL_LEFT, WHEEL_RIGHT = 1, 2, 3, 4, 5, 6, 7
MAX_SCROLL_CLICKS = 200
MAX_PAUSE_S = 60.0
MAX_TEXT_CHARS = 20_000
CLICK_GAP_S = 0.01
"""Between the clicks of a double click; toolkits drop a second press that has the first one's time stamp."""
DRAG_STEPS = 8
DRAG_GAP_S = 0.01


@dataclass(frozen=True)
class Move:
    """The pointer goes to a desktop pixel, or by that much when relative; on a straight way of `num_steps` steps."""

    x_px: int
    y_px: int
    is_relative: bool = False
    num_steps: int = 1


@dataclass(frozen=True)
class Button:
    """A mouse button (1 left, 2 middle, 3 right, 4..7 wheel up, down, left, right) goes down or up."""

    number: int
    is_down: bool


@dataclass(frozen=True)
class Key:
    """A key by name ("ctrl", "enter", "a", an X keysym name) goes down or up."""

    name: str
    is_down: bool


@dataclass(frozen=True)
class Text:
    """Characters typed one after the other; a line break is Return, a tab is Tab."""

    text: str


@dataclass(frozen=True)
class Pause:
    """Nothing for so long."""

    seconds: float


InputEvent = Move | Button | Key | Text | Pause

_CLICKS = {
    "left_click": (LEFT, 1),
    "right_click": (RIGHT, 1),
    "middle_click": (MIDDLE, 1),
    "double_click": (LEFT, 2),
    "triple_click": (LEFT, 3),
}


def compile_actions(actions: Iterable[GuiAction], screen_wh_px: tuple[int, int]) -> tuple[InputEvent, ...]:
    """The events of `actions` in order. ValueError names the first action that cannot be played; none is played then."""
    events: list[InputEvent] = []
    for index, action in enumerate(actions):
        try:
            events += compile_action(action, screen_wh_px)
        except ValueError as error:
            raise ValueError(f"action {index} ({action.kind}): {error}") from None
    return tuple(events)


def compile_action(action: GuiAction, screen_wh_px: tuple[int, int]) -> list[InputEvent]:
    """The events of one GUI action. ValueError for a missing point, an unknown key, or too long a text or pause."""
    kind = action.kind
    if kind == "screenshot":
        return []
    if kind == "wait":
        return [Pause(_bounded("time_s", action.time_s, MAX_PAUSE_S))]
    if kind == "type":
        return [Text(_typed(action.text))]
    if kind == "key":
        if not action.keys:
            raise ValueError('needs keys, for example ("ctrl", "s")')
        return hold(action.keys, [])
    moves: list[InputEvent] = []
    if action.point is not None:
        moves = [Move(*to_pixels(action.point, screen_wh_px))]
    elif kind not in ("scroll", "hscroll"):
        raise ValueError("needs a point")
    if kind == "mouse_move":
        return moves
    if kind == "left_click_drag":
        return hold(action.keys, drag(moves))
    if kind in _CLICKS:
        number, count = _CLICKS[kind]
        return hold(action.keys, moves + clicks(number, count))
    return hold(action.keys, moves + wheel(action.scroll_clicks, is_horizontal=kind == "hscroll"))


def hold(keys: tuple[str, ...], inner: list[InputEvent]) -> list[InputEvent]:
    """`inner` with `keys` held down around it; without `inner` a key combination. ValueError for an unknown key."""
    names = [check_key(key) for key in keys]
    down: list[InputEvent] = [Key(name, True) for name in names]
    return down + inner + [Key(name, False) for name in reversed(names)]


def clicks(number: int, count: int, gap_s: float = CLICK_GAP_S) -> list[InputEvent]:
    """`count` clicks of a button where the pointer is."""
    one: list[InputEvent] = [Button(number, True), Button(number, False)]
    return one + [event for _ in range(count - 1) for event in (Pause(gap_s), *one)]


def wheel(num_clicks: int, is_horizontal: bool) -> list[InputEvent]:
    """Wheel clicks: positive is up, or right when horizontal."""
    if abs(num_clicks) > MAX_SCROLL_CLICKS:
        raise ValueError(f"scrolls {num_clicks} clicks; at most {MAX_SCROLL_CLICKS} either way")
    forth, back = (WHEEL_RIGHT, WHEEL_LEFT) if is_horizontal else (WHEEL_UP, WHEEL_DOWN)
    number = forth if num_clicks > 0 else back
    return [event for _ in range(abs(num_clicks)) for event in (Button(number, True), Button(number, False))]


def drag(moves: list[InputEvent], number: int = LEFT) -> list[InputEvent]:
    """Press where the pointer is, go along `moves` in small steps, release."""
    way = [replace(event, num_steps=DRAG_STEPS) if isinstance(event, Move) else event for event in moves]
    return [Button(number, True), Pause(DRAG_GAP_S), *way, Pause(DRAG_GAP_S), Button(number, False)]


def parted(events: Iterable[InputEvent]) -> list[Pause | list[InputEvent]]:
    """`events` cut at its pauses."""
    parts: list[Pause | list[InputEvent]] = []
    for event in events:
        if isinstance(event, Pause):
            parts.append(event)
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(event)
        else:
            parts.append([event])
    return parts


def _typed(text: str | None) -> str:
    if text is None:
        raise ValueError("needs text")
    if len(text) > MAX_TEXT_CHARS:
        raise ValueError(
            f"text has {len(text)} characters; at most {MAX_TEXT_CHARS}, or write a file by code"
        )
    for char in text:
        if (ord(char) < 32 and char not in "\n\r\t\b\x1b") or 0xD800 <= ord(char) < 0xE000:
            raise ValueError(f"text has the untypable character U+{ord(char):04X}")
    return text


def _bounded(name: str, value: float, limit: float) -> float:
    if not math.isfinite(value) or not 0 <= value <= limit:
        raise ValueError(f"{name} is {value}; it must be in 0..{limit:g}")
    return value
