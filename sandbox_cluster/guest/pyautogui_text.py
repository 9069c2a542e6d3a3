"""Input events as a program of pyautogui calls, for machines that run OSWorld's or WindowsAgentArena's control server.

The inverse of guest/pyautogui.py. Only plain calls with literal arguments, so a server of ours plays them without a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sandbox_cluster.guest import events as ev
from sandbox_cluster.guest.events import Button, InputEvent, Key, Move, Text

_PREFIX = "import pyautogui; import time; pyautogui.FAILSAFE = False; pyautogui.PAUSE = 0"
_BUTTONS = {ev.LEFT: "left", ev.MIDDLE: "middle", ev.RIGHT: "right"}
_WHEEL = {
    ev.WHEEL_UP: ("scroll", 1),
    ev.WHEEL_DOWN: ("scroll", -1),
    ev.WHEEL_LEFT: ("hscroll", -1),
    ev.WHEEL_RIGHT: ("hscroll", 1),
}
_WINDOWS_NOTCH = 120
"""pyautogui counts wheel clicks on Linux, hundred-and-twentieths of one on Windows."""
_NAMES = {
    "control": "ctrl",
    "control_l": "ctrlleft",
    "control_r": "ctrlright",
    "alt_l": "altleft",
    "alt_r": "altright",
    "shift_l": "shiftleft",
    "shift_r": "shiftright",
    "super": "win",
    "super_l": "winleft",
    "super_r": "winright",
    "meta": "win",
    "cmd": "win",
    "command": "win",
    "escape": "esc",
    "return": "enter",
    "del": "delete",
    "page_up": "pageup",
    "page_down": "pagedown",
    "caps_lock": "capslock",
    "menu": "apps",
}
_TYPE_OTHERS = """
def type_others(text):
    try:
        from Xlib import X, XK, display
        from Xlib.ext import xtest
    except ImportError:
        import pyperclip
        pyperclip.copy(text); pyautogui.hotkey("ctrl", "v"); time.sleep(0.1)
        return
    d = display.Display()
    first, count = d.display.info.min_keycode, d.display.info.max_keycode - d.display.info.min_keycode + 1
    spare = [first + i for i, row in enumerate(d.get_keyboard_mapping(first, count)) if not any(row)]
    for char in text:
        sym = ord(char) if 0xA0 <= ord(char) <= 0xFF else 0x01000000 + ord(char)
        d.change_keyboard_mapping(spare[-1], [[sym, sym]]); d.sync(); time.sleep(0.03)
        xtest.fake_input(d, X.KeyPress, spare[-1]); xtest.fake_input(d, X.KeyRelease, spare[-1]); d.sync(); time.sleep(0.03)
    d.change_keyboard_mapping(spare[-1], [[0, 0]]); d.sync()
"""
"""Characters that pyautogui drops: by a spare key code on X (python-xlib comes with pyautogui there), by the clipboard elsewhere."""


def program_text(events: Sequence[InputEvent], is_windows: bool = False) -> str:
    """A program that plays `events`, which hold no Pause. One statement a line after the prefix."""
    lines = list(_lines(_merged(events), is_windows))
    helper = _TYPE_OTHERS if any(line.startswith("type_others") for line in lines) else ""
    return "\n".join([_PREFIX + helper, *lines])


def _merged(events: Iterable[InputEvent]) -> list[InputEvent | tuple[int, int]]:
    """Wheel presses and releases in a row as one (button, count)."""
    merged: list[InputEvent | tuple[int, int]] = []
    for event in events:
        if not (isinstance(event, Button) and event.number in _WHEEL):
            merged.append(event)
        elif event.is_down:
            last = merged[-1] if merged else None
            if isinstance(last, tuple) and last[0] == event.number:
                merged[-1] = (event.number, last[1] + 1)
            else:
                merged.append((event.number, 1))
    return merged


def _lines(events: Iterable[InputEvent | tuple[int, int]], is_windows: bool) -> Iterable[str]:
    for event in events:
        if isinstance(event, tuple):
            name, sign = _WHEEL[event[0]]
            yield f"pyautogui.{name}({sign * event[1] * (_WINDOWS_NOTCH if is_windows else 1)})"
        elif isinstance(event, Move):
            name = "move" if event.is_relative else "moveTo"
            duration = f", duration={0.01 * event.num_steps:g}" if event.num_steps > 1 else ""
            yield f"pyautogui.{name}({event.x_px}, {event.y_px}{duration})"
        elif isinstance(event, Button):
            yield f"pyautogui.mouse{'Down' if event.is_down else 'Up'}(button={_BUTTONS[event.number]!r})"
        elif isinstance(event, Key):
            yield f"pyautogui.key{'Down' if event.is_down else 'Up'}({_key(event.name)!r})"
        elif isinstance(event, Text):
            yield from _typed(event.text)


def _key(name: str) -> str:
    lower = name.lower()
    return name if len(name) == 1 else _NAMES.get(lower, lower)


def _typed(text: str) -> Iterable[str]:
    """pyautogui types ASCII; its X port types `<` as `>`, so that goes as a hotkey, as OSWorld's client sends it."""
    run, is_plain = "", True
    for char in text.replace("\r\n", "\n").replace("\r", "\n"):
        if char == "<":
            yield from _flush(run, is_plain)
            run = ""
            yield "pyautogui.hotkey('shift', ',')"
            continue
        if char.isascii() != is_plain:
            yield from _flush(run, is_plain)
            run, is_plain = "", char.isascii()
        run += char
    yield from _flush(run, is_plain)


def _flush(run: str, is_plain: bool) -> Iterable[str]:
    if run:
        yield f"pyautogui.write({run!r})" if is_plain else f"type_others({run!r})"
