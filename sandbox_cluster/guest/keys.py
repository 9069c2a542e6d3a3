"""Key names people and policies use, as X keysym numbers."""

from __future__ import annotations

import difflib
import functools

from Xlib import XK

_NAMES = {
    "ctrl": "Control_L",
    "control": "Control_L",
    "ctrlleft": "Control_L",
    "ctrlright": "Control_R",
    "alt": "Alt_L",
    "altleft": "Alt_L",
    "altright": "Alt_R",
    "altgr": "ISO_Level3_Shift",
    "option": "Alt_L",
    "shift": "Shift_L",
    "shiftleft": "Shift_L",
    "shiftright": "Shift_R",
    "win": "Super_L",
    "winleft": "Super_L",
    "winright": "Super_R",
    "super": "Super_L",
    "meta": "Super_L",
    "cmd": "Super_L",
    "command": "Super_L",
    "enter": "Return",
    "return": "Return",
    "\n": "Return",
    "\r": "Return",
    "tab": "Tab",
    "\t": "Tab",
    "esc": "Escape",
    "escape": "Escape",
    "backspace": "BackSpace",
    "\b": "BackSpace",
    "del": "Delete",
    "delete": "Delete",
    "insert": "Insert",
    "space": "space",
    "up": "Up",
    "down": "Down",
    "left": "Left",
    "right": "Right",
    "home": "Home",
    "end": "End",
    "pageup": "Page_Up",
    "page_up": "Page_Up",
    "pgup": "Page_Up",
    "pagedown": "Page_Down",
    "page_down": "Page_Down",
    "pgdn": "Page_Down",
    "capslock": "Caps_Lock",
    "caps_lock": "Caps_Lock",
    "numlock": "Num_Lock",
    "scrolllock": "Scroll_Lock",
    "printscreen": "Print",
    "prtsc": "Print",
    "prntscrn": "Print",
    "pause": "Pause",
    "menu": "Menu",
    "apps": "Menu",
    "add": "KP_Add",
    "subtract": "KP_Subtract",
    "multiply": "KP_Multiply",
    "divide": "KP_Divide",
    "decimal": "KP_Decimal",
    **{f"f{n}": f"F{n}" for n in range(1, 25)},
    **{f"num{n}": f"KP_{n}" for n in range(10)},
}
_EXTRA = {"ISO_Level3_Shift": 0xFE03, "ISO_Left_Tab": 0xFE20, "Super_L": 0xFFEB, "Super_R": 0xFFEC}


def keysym_of_char(char: str) -> int:
    """The keysym that gives the character `char`: Latin-1 directly, others as 0x01000000 + code point."""
    special = {"\n": "Return", "\r": "Return", "\t": "Tab", "\b": "BackSpace", "\x1b": "Escape"}.get(char)
    if special is not None:
        return XK.string_to_keysym(special)
    code = ord(char)
    return code if 0x20 <= code <= 0x7E or 0xA0 <= code <= 0xFF else 0x01000000 + code


@functools.lru_cache(maxsize=4096)
def keysym_of(name: str) -> int:
    """The keysym of a key name: our names in any case, X keysym names as written, single characters.

    Raises ValueError with the nearest known names.
    """
    known = _NAMES.get(name) or _NAMES.get(name.lower())
    if known is not None:
        return _EXTRA.get(known) or XK.string_to_keysym(known)
    if len(name) == 1:
        return keysym_of_char(name)
    keysym = _EXTRA.get(name) or XK.string_to_keysym(name)
    if keysym:
        return keysym
    near = difflib.get_close_matches(name.lower(), list(_NAMES), n=3, cutoff=0.6)
    hint = (
        f"did you mean {' or '.join(near)}?"
        if near
        else 'use names like "ctrl", "enter", "f5" or one character'
    )
    raise ValueError(f"unknown key {name!r}; {hint}")


def check_key(name: str) -> str:
    """`name`, if it is a key."""
    keysym_of(name)
    return name
