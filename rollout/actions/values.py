"""Reading single argument values: model output is data, so nothing here evaluates, guesses or half-reads."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from rollout.actions.keys import key_name
from rollout.actions.mending import Mender
from slime_cua.core.actions import GuiAction
from slime_cua.core.coordinates import GRID, Point
from slime_cua.core.errors import ActionParseError

MAX_SCROLL_CLICKS = 200
MAX_WAIT_S = 60.0
DEFAULT_WAIT_S = 1.0
MAX_TEXT_CHARS = 20_000
MAX_KEYS = 8
_DECIMAL = re.compile(r"[+-]?[0-9]{1,7}(\.[0-9]{1,12})?", re.ASCII)
_BRACKETS = (("[", "]"), ("(", ")"), ("<point>", "</point>"))


def read_number(value: Any, name: str) -> float:
    """A finite number from an int, a float or a plain decimal string. A boolean is not a number."""
    if isinstance(value, str) and len(value) <= 64 and _DECIMAL.fullmatch(value.strip()):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ActionParseError("bad_number", f"{name} must be a number, not {_shown(value)}")
    if isinstance(value, int) and abs(value) > 10**9:
        raise ActionParseError("bad_number", f"{name} is far out of range")
    if not math.isfinite(value):
        raise ActionParseError("bad_number", f"{name} must be finite, not {value}")
    return float(value)


def read_point(value: Any) -> Point:
    """A grid point from [x, y] or one of its text forms: "[x, y]", "x, y", "(x, y)", "x y", "<point>x y</point>".

    Raises ActionParseError: bad_coordinate for another shape, coordinate_out_of_range outside 0..1000.
    """
    parts: Any = _split_pair(value) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise ActionParseError("bad_coordinate", f"coordinate must be [x, y], not {_shown(value)}")
    try:
        x, y = (read_number(part, "coordinate") for part in parts)
    except ActionParseError as error:
        raise ActionParseError(
            "bad_coordinate", f"coordinate must be two numbers, not {_shown(value)}"
        ) from error
    if not (0 <= x <= GRID and 0 <= y <= GRID):
        raise ActionParseError(
            "coordinate_out_of_range", f"coordinate {_shown(value)} must lie in 0..{GRID} on both axes"
        )
    return Point(x=x + 0.0, y=y + 0.0)


def _split_pair(text: str) -> list[str]:
    if len(text) > 128:
        return []
    text = text.strip()
    for opening, closing in _BRACKETS:
        if text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
            break
    return [part.strip() for part in text.split(",")] if "," in text else text.split()


def read_text(value: Any, name: str) -> str:
    """A string that can be typed or run: valid Unicode without NUL."""
    if not isinstance(value, str):
        raise ActionParseError("bad_text", f"{name} must be a string, not {_shown(value)}")
    if len(value) > MAX_TEXT_CHARS:
        raise ActionParseError("bad_text", f"{name} has {len(value)} characters; at most {MAX_TEXT_CHARS}")
    if "\x00" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise ActionParseError(
            "bad_text", f"{name} holds a NUL or half a surrogate pair, which cannot be typed"
        )
    return value


def read_keys(value: Any, mender: Mender) -> tuple[str, ...]:
    """Key names in our spelling from a list of strings. Mended: "ctrl+s" as one string."""
    if isinstance(value, str):
        mender.allow("keys_as_text", f"keys must be a list such as ['ctrl', 's'], not {_shown(value)}")
        value = [value] if key_name(value) else [part for part in value.replace("+", " ").split(" ") if part]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_KEYS:
        raise ActionParseError("bad_keys", f"keys must be a list of 1 to {MAX_KEYS} names")
    names = []
    for spelling in value:
        name = key_name(spelling) if isinstance(spelling, str) else None
        if name is None:
            raise ActionParseError(
                "bad_keys", f"unknown key {_shown(spelling)}; use names like 'ctrl', 'enter', 'a'"
            )
        names.append(name)
    return tuple(names)


def read_scroll(value: Any) -> int:
    """Wheel steps from `pixels`: rounded to a whole number that is not 0."""
    clicks = math.floor(read_number(value, "pixels") + 0.5)
    if clicks == 0 or abs(clicks) > MAX_SCROLL_CLICKS:
        raise ActionParseError("bad_number", f"pixels must be 1 to {MAX_SCROLL_CLICKS} or its negative")
    return clicks


def read_wait(value: Any) -> float:
    """Seconds from `time`."""
    time_s = read_number(value, "time")
    if not 0 <= time_s <= MAX_WAIT_S:
        raise ActionParseError("bad_number", f"time must be 0 to {MAX_WAIT_S:.0f} seconds")
    return time_s


def read_gui(verb: Any, arguments: dict[str, Any], mender: Mender) -> GuiAction:
    """A GuiAction from a verb and the arguments it has; which ones it needs was checked before."""
    fields: dict[str, Any] = {"kind": verb}
    if "coordinate" in arguments:
        fields["point"] = read_point(arguments["coordinate"])
    if "keys" in arguments:
        fields["keys"] = read_keys(arguments["keys"], mender)
    if "text" in arguments:
        fields["text"] = read_text(arguments["text"], "text")
    if "pixels" in arguments:
        fields["scroll_clicks"] = read_scroll(arguments["pixels"])
    if verb == "wait":
        fields["time_s"] = read_wait(arguments.get("time", DEFAULT_WAIT_S))
    return GuiAction(**fields)


def _shown(value: Any) -> str:
    """`value` for a message: JSON, cut short."""
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
