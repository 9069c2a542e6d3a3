"""OSWorld's pyautogui action space as our actions. The code is parsed, never run: calls with literal arguments only."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from rollout.actions.import_vendors import click, pixel_point, scrolls, unsupported
from rollout.actions.mending import Mender
from rollout.actions.values import MAX_WAIT_S, read_keys, read_number, read_text
from slime_cua.core.actions import Action, GuiAction, TerminateAction
from slime_cua.core.coordinates import Point
from slime_cua.core.errors import ActionParseError

Arguments = dict[str, Any]
MAX_CHARS = 50_000


def from_pyautogui(code: str) -> list[Action]:
    """The actions of an OSWorld action string: WAIT, DONE, FAIL, or lines such as pyautogui.click(10, 20).

    Raises ActionParseError: bad_code for what is not plain calls, unsupported for a call without counterpart.
    Source: pyautogui's documentation (names and order of arguments).
    """
    word = code.strip()
    if word in ("DONE", "FAIL"):
        return [TerminateAction(status="success" if word == "DONE" else "failure")]
    if word == "WAIT":
        return [GuiAction(kind="wait", time_s=1.0)]
    if len(code) > MAX_CHARS:
        raise ActionParseError("bad_code", f"the code has more than {MAX_CHARS} characters")
    try:
        lines = ast.parse(code.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ActionParseError("bad_code", f"not Python: {str(error)[:80]}") from error
    found = [action for line in lines for action in _line(line)]
    if not found:
        raise ActionParseError("bad_code", "the code holds no action")
    return found


def _line(line: ast.stmt) -> list[Action]:
    if isinstance(line, ast.Import | ast.ImportFrom) or _is_failsafe(line):
        return []
    if not isinstance(line, ast.Expr) or not isinstance(line.value, ast.Call):
        raise ActionParseError("bad_code", f"only calls are read, not {type(line).__name__}")
    call = line.value
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
        raise ActionParseError("bad_code", "only calls of pyautogui and time.sleep are read")
    name = f"{call.func.value.id}.{call.func.attr}"
    reader = _READERS.get(name)
    if reader is None:
        raise unsupported(name)
    order, read = reader
    return read(_arguments(call, name, order))


def _is_failsafe(line: ast.stmt) -> bool:
    """`pyautogui.FAILSAFE = False`, which OSWorld puts before every action."""
    target = line.targets[0] if isinstance(line, ast.Assign) else None
    return isinstance(target, ast.Attribute) and target.attr in ("FAILSAFE", "PAUSE")


def _arguments(call: ast.Call, name: str, order: tuple[str, ...]) -> Arguments:
    """Positional and named arguments by name; the last name takes the rest where it begins with a star."""
    values = [_literal(argument) for argument in call.args]
    if order and order[-1].startswith("*"):
        return {order[-1][1:]: values}
    if len(values) > len(order):
        raise ActionParseError("bad_code", f"{name} takes at most {len(order)} positional arguments")
    found = dict(zip(order, values, strict=False))
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in found:
            raise ActionParseError("bad_code", f"{name}: arguments must be plain and given once")
        found[keyword.arg] = _literal(keyword.value)
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ActionParseError("bad_code", "arguments must be literals") from error


def _point(given: Arguments) -> Point | None:
    x, y = given.get("x"), given.get("y")
    if isinstance(x, list | tuple) and len(x) == 2 and y is None:
        x, y = x
    return pixel_point(x, y) if x is not None and y is not None else None


def _clicker(button: str, num_clicks: int) -> Callable[[Arguments], list[Action]]:
    return lambda given: [click(given.get("button", button), given.get("clicks", num_clicks), _point(given))]


def _mover(kind: Any) -> Callable[[Arguments], list[Action]]:
    def read(given: Arguments) -> list[Action]:
        point = _point(given)
        if point is None or given.get("button", "left") != "left":
            raise unsupported(f"{kind} without a position, or by another button")
        return [GuiAction(kind=kind, point=point)]

    return read


def _write(given: Arguments) -> list[Action]:
    message = given.get("message")
    if isinstance(message, list):
        return [GuiAction(kind="key", keys=read_keys([key], Mender())) for key in message]
    return [GuiAction(kind="type", text=read_text(message, "message"))]


def _press(given: Arguments) -> list[Action]:
    keys = given.get("keys")
    presses = given.get("presses", 1)
    if not isinstance(presses, int) or not 1 <= presses <= 100:
        raise unsupported(f"press with presses={presses}")
    once = [
        GuiAction(kind="key", keys=read_keys([key], Mender()))
        for key in (keys if isinstance(keys, list | tuple) else [keys])
    ]
    return [*once] * presses


def _sleep(given: Arguments) -> list[Action]:
    return [GuiAction(kind="wait", time_s=min(max(read_number(given.get("secs"), "secs"), 0.0), MAX_WAIT_S))]


_XY = ("x", "y")
_CLICK = (*_XY, "clicks", "interval", "button")
_READERS: dict[str, tuple[tuple[str, ...], Callable[[Arguments], list[Action]]]] = {
    "pyautogui.click": (_CLICK, _clicker("left", 1)),
    "pyautogui.leftClick": (_XY, _clicker("left", 1)),
    "pyautogui.rightClick": (_XY, _clicker("right", 1)),
    "pyautogui.middleClick": (_XY, _clicker("middle", 1)),
    "pyautogui.doubleClick": (_XY, _clicker("left", 2)),
    "pyautogui.tripleClick": (_XY, _clicker("left", 3)),
    "pyautogui.moveTo": ((*_XY, "duration"), _mover("mouse_move")),
    "pyautogui.dragTo": ((*_XY, "duration"), _mover("left_click_drag")),
    "pyautogui.write": (("message", "interval"), _write),
    "pyautogui.typewrite": (("message", "interval"), _write),
    "pyautogui.press": (("keys", "presses", "interval"), _press),
    "pyautogui.hotkey": (
        ("*keys",),
        lambda given: [GuiAction(kind="key", keys=read_keys(given["keys"], Mender()))],
    ),
    "pyautogui.scroll": (
        ("clicks", *_XY),
        lambda given: scrolls(0, given.get("clicks", 0), _point(given)),
    ),
    "pyautogui.hscroll": (
        ("clicks", *_XY),
        lambda given: scrolls(given.get("clicks", 0), 0, _point(given)),
    ),
    "pyautogui.sleep": (("secs",), _sleep),
    "time.sleep": (("secs",), _sleep),
}
