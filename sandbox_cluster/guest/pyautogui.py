"""pyautogui commands as input events: what OSWorld's agents send, without a Python process per click.

Only a fixed list of calls with literal arguments is understood (and `for _ in range(N)` around them). Anything else is left
to a real interpreter inside the desktop. Source: pyautogui 0.9.54, documented signatures and defaults.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from sandbox_cluster.guest import events as ev
from sandbox_cluster.guest.events import Button, InputEvent, Key, Move, Pause, Text
from sandbox_cluster.guest.keys import check_key, keysym_of

DEFAULT_PAUSE_S = 0.1
"""pyautogui waits so long after each of its calls."""
STEP_S = 0.004
MAX_LOOP, MAX_EVENTS, MAX_STEPS = 1000, 50_000, 1000
_BUTTONS = {
    "left": ev.LEFT,
    "primary": ev.LEFT,
    "middle": ev.MIDDLE,
    "right": ev.RIGHT,
    "secondary": ev.RIGHT,
}
_BUTTON_NUMBERS = {1: ev.LEFT, 2: ev.MIDDLE, 3: ev.RIGHT}


class NotUnderstoodError(Exception):
    """The program does more than the list of calls allows: run it for real."""


def compile_program(source: str, pause_s: float = DEFAULT_PAUSE_S) -> tuple[InputEvent, ...]:
    """The events of a program of pyautogui calls, `pause_s` after each call (a program's own PAUSE wins).

    Raises NotUnderstoodError for anything that is not on the list, ValueError for an argument that cannot be played.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotUnderstoodError("not a Python program") from None
    compiler = _Compiler(pause_s)
    compiler.run(body)
    if not compiler.is_pyautogui:
        raise NotUnderstoodError("no pyautogui in it")
    return tuple(compiler.events)


class _Compiler:
    def __init__(self, pause_s: float) -> None:
        self.events: list[InputEvent] = []
        self.is_pyautogui = False
        self._pause_s = pause_s

    def run(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)
            if len(self.events) > MAX_EVENTS:
                raise ValueError(f"more than {MAX_EVENTS} input events in one command")

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Import) and all(
            name.name in ("pyautogui", "time") and name.asname is None for name in node.names
        ):
            self.is_pyautogui |= any(name.name == "pyautogui" for name in node.names)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assign(ast.unparse(node.targets[0]), node.value)
        elif isinstance(node, ast.For) and not node.orelse and isinstance(node.target, ast.Name):
            for _ in range(self._count(node)):
                self.run(node.body)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._call(node.value)
        elif not (
            isinstance(node, ast.Pass)
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        ):
            raise NotUnderstoodError(ast.unparse(node))

    def _assign(self, target: str, value: ast.expr) -> None:
        if target == "pyautogui.PAUSE":
            self._pause_s = float(_literal(value))
        elif target != "pyautogui.FAILSAFE":
            raise NotUnderstoodError(target)

    def _count(self, node: ast.For) -> int:
        is_range = isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range"
        inner = [part for statement in node.body for part in ast.walk(statement)]
        names = {part.id for part in inner if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
        target = node.target
        assert isinstance(target, ast.Name)
        if not is_range or target.id in names:
            raise NotUnderstoodError("a loop that uses its variable")
        assert isinstance(node.iter, ast.Call)
        numbers = [_literal(argument) for argument in node.iter.args]
        if not all(isinstance(number, int) for number in numbers) or node.iter.keywords:
            raise NotUnderstoodError("a range that is not made of numbers")
        return min(len(range(*numbers)), MAX_LOOP)

    def _call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        arguments = [_literal(argument) for argument in node.args]
        named = {keyword.arg: _literal(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        if len(named) != len(node.keywords):
            raise NotUnderstoodError("arguments by **")
        if name in ("time.sleep", "pyautogui.sleep"):
            self.events.append(Pause(_seconds(arguments[0] if arguments else named.get("seconds", 0))))
            return
        module, _, function = name.partition(".")
        action = _CALLS.get(function) if module == "pyautogui" else None
        if action is None:
            raise NotUnderstoodError(name)
        named.pop("_pause", None)
        named.pop("logScreenshot", None)
        named.pop("tween", None)
        try:
            made = action(*arguments, **named)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from None
        self.events += made
        if self._pause_s > 0:
            self.events.append(Pause(min(self._pause_s, ev.MAX_PAUSE_S)))


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise NotUnderstoodError(ast.unparse(node)) from None


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds <= ev.MAX_PAUSE_S:
        raise ValueError(f"a wait of {seconds:g} s; it must be in 0..{ev.MAX_PAUSE_S:g}")
    return seconds


def _button(name: Any) -> int:
    number = _BUTTONS.get(name) if isinstance(name, str) else _BUTTON_NUMBERS.get(name)
    if number is None:
        raise ValueError(f"unknown mouse button {name!r}; have left, middle, right")
    return number


def _at(x: Any, y: Any, duration: Any = 0.0, is_relative: bool = False) -> list[InputEvent]:
    """A move to x, y; nothing without them. A pair may stand in x."""
    if isinstance(x, list | tuple) and len(x) == 2:
        x, y = x
    if x is None and y is None:
        return []
    if x is None or y is None:
        if not is_relative:
            raise NotUnderstoodError("a move along one axis needs the pointer's place")
        x, y = x or 0, y or 0
    steps = min(MAX_STEPS, max(1, int(_seconds(duration) / STEP_S)))
    return [Move(int(x), int(y), is_relative=is_relative, num_steps=steps)]


def _click(
    x: Any = None,
    y: Any = None,
    clicks: int = 1,
    interval: float = 0.0,
    button: Any = "left",
    duration: float = 0.0,
) -> list[InputEvent]:
    gap_s = max(_seconds(interval), ev.CLICK_GAP_S)
    return _at(x, y, duration) + ev.clicks(_button(button), min(int(clicks), MAX_LOOP), gap_s)


def _fixed(count: int, fixed_button: str | None = None) -> Callable[..., list[InputEvent]]:
    def click(
        x: Any = None, y: Any = None, interval: float = 0.0, button: Any = "left", duration: float = 0.0
    ) -> list[InputEvent]:
        return _click(x, y, count, interval, fixed_button or button, duration)

    return click


def _move_to(x: Any = None, y: Any = None, duration: float = 0.0) -> list[InputEvent]:
    return _at(x, y, duration)


def _move_by(xOffset: Any = None, yOffset: Any = None, duration: float = 0.0) -> list[InputEvent]:
    return _at(xOffset, yOffset, duration, is_relative=True)


def _drag(is_relative: bool) -> Callable[..., list[InputEvent]]:
    def drag(
        x: Any = None, y: Any = None, duration: float = 0.0, button: Any = "left", mouseDownUp: bool = True
    ) -> list[InputEvent]:
        moves = _at(x, y, max(float(duration), ev.DRAG_STEPS * STEP_S), is_relative)
        if not mouseDownUp:
            return moves
        number = _button(button)
        return [
            Button(number, True),
            Pause(ev.DRAG_GAP_S),
            *moves,
            Pause(ev.DRAG_GAP_S),
            Button(number, False),
        ]

    def drag_by(
        xOffset: Any = 0,
        yOffset: Any = 0,
        duration: float = 0.0,
        button: Any = "left",
        mouseDownUp: bool = True,
    ) -> list[InputEvent]:
        return drag(xOffset, yOffset, duration, button, mouseDownUp)

    return drag_by if is_relative else drag


def _press_button(is_down: bool) -> Callable[..., list[InputEvent]]:
    def press(x: Any = None, y: Any = None, button: Any = "left", duration: float = 0.0) -> list[InputEvent]:
        return [*_at(x, y, duration), Button(_button(button), is_down)]

    return press


def _scroll(is_horizontal: bool) -> Callable[..., list[InputEvent]]:
    def scroll(clicks: Any = 0, x: Any = None, y: Any = None) -> list[InputEvent]:
        return _at(x, y) + ev.wheel(int(clicks), is_horizontal)

    return scroll


def _tap(name: str) -> list[InputEvent]:
    return [Key(check_key(name), True), Key(name, False)]


def _press(keys: Any = (), presses: int = 1, interval: float = 0.0) -> list[InputEvent]:
    names = [keys] if isinstance(keys, str) else [str(key) for key in keys]
    pause: list[InputEvent] = [Pause(_seconds(interval))] if interval else []
    one = [event for name in names for event in (*_tap(name), *pause)]
    return one * min(int(presses), MAX_LOOP)


def _write(message: Any = "", interval: float = 0.0) -> list[InputEvent]:
    if not isinstance(message, str):
        return _press(message, 1, interval)
    for char in message:
        keysym_of(char)
    if not interval:
        return [Text(message)]
    return [event for char in message for event in (Text(char), Pause(_seconds(interval)))]


def _hotkey(*names: Any, interval: float = 0.0) -> list[InputEvent]:
    flat = names[0] if len(names) == 1 and isinstance(names[0], list | tuple) else names
    return ev.hold(tuple(str(name) for name in flat), [])


_CALLS: dict[str, Callable[..., list[InputEvent]]] = {
    "click": _click,
    "leftClick": _fixed(1, "left"),
    "rightClick": _fixed(1, "right"),
    "middleClick": _fixed(1, "middle"),
    "doubleClick": _fixed(2),
    "tripleClick": _fixed(3),
    "moveTo": _move_to,
    "moveRel": _move_by,
    "move": _move_by,
    "dragTo": _drag(False),
    "dragRel": _drag(True),
    "drag": _drag(True),
    "mouseDown": _press_button(True),
    "mouseUp": _press_button(False),
    "scroll": _scroll(False),
    "vscroll": _scroll(False),
    "hscroll": _scroll(True),
    "press": _press,
    "keyDown": lambda key: [Key(check_key(key), True)],
    "keyUp": lambda key: [Key(check_key(key), False)],
    "hotkey": _hotkey,
    "write": _write,
    "typewrite": _write,
}
