"""Key names a policy may press, in one spelling each."""

from __future__ import annotations

_CANONICAL = (
    *("ctrl", "alt", "shift", "win", "enter", "tab", "esc", "backspace", "delete", "insert", "space"),
    *("up", "down", "left", "right", "home", "end", "pageup", "pagedown"),
    *("capslock", "numlock", "scrolllock", "printscreen", "pause", "menu", "altgr"),
    *(f"f{number}" for number in range(1, 25)),
)
_ALIASES = {
    "control": "ctrl",
    "ctrl_l": "ctrl",
    "control_l": "ctrl",
    "ctrlleft": "ctrl",
    "ctrl_r": "ctrl",
    "control_r": "ctrl",
    "ctrlright": "ctrl",
    "alt_l": "alt",
    "altleft": "alt",
    "alt_r": "alt",
    "altright": "alt",
    "option": "alt",
    "shift_l": "shift",
    "shiftleft": "shift",
    "shift_r": "shift",
    "shiftright": "shift",
    "super": "win",
    "super_l": "win",
    "super_r": "win",
    "winleft": "win",
    "winright": "win",
    "meta": "win",
    "cmd": "win",
    "command": "win",
    "return": "enter",
    "escape": "esc",
    "back_space": "backspace",
    "del": "delete",
    "page_up": "pageup",
    "pgup": "pageup",
    "prior": "pageup",
    "page_down": "pagedown",
    "pgdn": "pagedown",
    "next": "pagedown",
    "arrowup": "up",
    "arrowdown": "down",
    "arrowleft": "left",
    "arrowright": "right",
    "caps_lock": "capslock",
    "num_lock": "numlock",
    "prtsc": "printscreen",
    "prntscrn": "printscreen",
    "print": "printscreen",
    "apps": "menu",
    " ": "space",
    "\n": "enter",
    "\t": "tab",
}
KEY_NAMES = {**{name: name for name in _CANONICAL}, **_ALIASES}
"""Accepted spelling (lower case) -> the name that a GuiAction carries."""


def key_name(spelling: str) -> str | None:
    """The name of a key in our spelling, or None: "Return" -> "enter", "S" -> "s", "+" -> "+".

    A single printable character names its own key; letters are taken in lower case, as shift is a key of its own.
    """
    known = KEY_NAMES.get(spelling) or KEY_NAMES.get(spelling.lower())
    if known is not None:
        return known
    if len(spelling) == 1 and spelling.isprintable():
        lowered = spelling.lower()
        return lowered if len(lowered) == 1 else spelling
    return None
