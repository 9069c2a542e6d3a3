"""`import pyautogui` inside a local desktop: its common calls through xdotool, for programs that do more than a list of calls.

Bound as a module into the sandbox; standard library only; never imported by the host. Not offered: images, message boxes.
"""

import subprocess
import time

FAILSAFE = False
PAUSE = 0.1
MINIMUM_DURATION = 0.1
_BUTTONS = {
    "left": "1",
    "primary": "1",
    "middle": "2",
    "right": "3",
    "secondary": "3",
    1: "1",
    2: "2",
    3: "3",
}
_KEYS = {
    "enter": "Return", "return": "Return", "\n": "Return", "tab": "Tab", "\t": "Tab", "esc": "Escape",
    "escape": "Escape", "backspace": "BackSpace", "delete": "Delete", "del": "Delete", "space": "space",
    " ": "space", "up": "Up", "down": "Down", "left": "Left", "right": "Right", "home": "Home", "end": "End",
    "pageup": "Page_Up", "pgup": "Page_Up", "pagedown": "Page_Down", "pgdn": "Page_Down", "insert": "Insert",
    "ctrlleft": "Control_L", "ctrlright": "Control_R", "altleft": "Alt_L", "altright": "Alt_R",
    "shiftleft": "Shift_L", "shiftright": "Shift_R", "win": "super", "winleft": "super", "command": "super",
    "capslock": "Caps_Lock", "numlock": "Num_Lock", "printscreen": "Print", "apps": "Menu",
    **{f"f{n}": f"F{n}" for n in range(1, 25)},
}  # fmt: skip


class PyAutoGUIException(Exception):
    pass


class FailSafeException(PyAutoGUIException):
    pass


def _run(*words):
    return subprocess.run(["xdotool", *map(str, words)], check=True, capture_output=True, text=True).stdout


def _act(*words):
    _run(*words)
    time.sleep(PAUSE)


def _key(name):
    if name in _KEYS or name.lower() in _KEYS:
        return _KEYS.get(name) or _KEYS[name.lower()]
    return f"U{ord(name):04X}" if len(name) == 1 and not name.isalnum() else name


def _place(x, y):
    if x is not None and y is None and not isinstance(x, (int, float)):
        x, y = x
    if x is None and y is None:
        return []
    now = position()
    return ["mousemove", int(now[0] if x is None else x), int(now[1] if y is None else y)]


def position():
    values = dict(line.split("=") for line in _run("getmouselocation", "--shell").split())
    return int(values["X"]), int(values["Y"])


def size():
    width, height = _run("getdisplaygeometry").split()
    return int(width), int(height)


def onScreen(x, y=None):
    x, y = x if y is None else (x, y)
    return 0 <= x < size()[0] and 0 <= y < size()[1]


def sleep(seconds):
    time.sleep(seconds)


def moveTo(x=None, y=None, duration=0.0, *_, **__):
    place = _place(x, y)
    if place:
        time.sleep(duration)
        _act(*place)


def moveRel(xOffset=0, yOffset=0, duration=0.0, *_, **__):
    x, y = position()
    moveTo(x + (xOffset or 0), y + (yOffset or 0), duration)


move = moveRel


def click(x=None, y=None, clicks=1, interval=0.0, button="left", duration=0.0, *_, **__):
    time.sleep(duration)
    delay = ["--delay", max(10, int(interval * 1000))]
    _act(*_place(x, y), "click", "--repeat", clicks, *delay, _BUTTONS[button])


def rightClick(x=None, y=None, *_, **__):
    click(x, y, button="right")


def middleClick(x=None, y=None, *_, **__):
    click(x, y, button="middle")


def doubleClick(x=None, y=None, interval=0.0, button="left", *_, **__):
    click(x, y, 2, interval, button)


def tripleClick(x=None, y=None, interval=0.0, button="left", *_, **__):
    click(x, y, 3, interval, button)


leftClick = click


def mouseDown(x=None, y=None, button="left", *_, **__):
    _act(*_place(x, y), "mousedown", _BUTTONS[button])


def mouseUp(x=None, y=None, button="left", *_, **__):
    _act(*_place(x, y), "mouseup", _BUTTONS[button])


def dragTo(x=None, y=None, duration=0.0, button="left", *_, **__):
    _run("mousedown", _BUTTONS[button])
    moveTo(x, y, duration)
    _act("mouseup", _BUTTONS[button])


def dragRel(xOffset=0, yOffset=0, duration=0.0, button="left", *_, **__):
    x, y = position()
    dragTo(x + (xOffset or 0), y + (yOffset or 0), duration, button)


drag = dragRel


def _wheel(clicks, forth, back, x, y):
    if clicks:
        _act(
            *_place(x, y), "click", "--repeat", abs(int(clicks)), "--delay", 5, forth if clicks > 0 else back
        )


def scroll(clicks, x=None, y=None, *_, **__):
    _wheel(clicks, 4, 5, x, y)


vscroll = scroll


def hscroll(clicks, x=None, y=None, *_, **__):
    _wheel(clicks, 7, 6, x, y)


def keyDown(key, *_, **__):
    _act("keydown", _key(key))


def keyUp(key, *_, **__):
    _act("keyup", _key(key))


def press(keys, presses=1, interval=0.0, *_, **__):
    for _number in range(presses):
        for key in [keys] if isinstance(keys, str) else keys:
            _run("key", _key(key))
            time.sleep(interval)
    time.sleep(PAUSE)


def hotkey(*keys, **_):
    keys = keys[0] if len(keys) == 1 and not isinstance(keys[0], str) else keys
    _act("key", "+".join(_key(key) for key in keys))


def typewrite(message, interval=0.0, *_, **__):
    if isinstance(message, str):
        _act("type", "--delay", max(12, int(interval * 1000)), "--", message)
    else:
        press(message, 1, interval)


write = typewrite
