"""pyautogui commands become the events that pyautogui documents; whatever is more than a list of calls is left alone."""

from __future__ import annotations

import pytest

from sandbox_cluster.guest.events import Button, InputEvent, Key, Move, Pause, Text
from sandbox_cluster.guest.pyautogui import NotUnderstoodError, compile_program

PREFIX = "import pyautogui; import time; pyautogui.FAILSAFE = False; "
CLICK = [Button(1, True), Button(1, False)]
RIGHT = [Button(3, True), Button(3, False)]
WHEEL_UP = [Button(4, True), Button(4, False)]
CTRL_S = [Key("ctrl", True), Key("s", True), Key("s", False), Key("ctrl", False)]


def tap(name: str) -> list[InputEvent]:
    return [Key(name, True), Key(name, False)]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pyautogui.click(10, 20)", [Move(10, 20), *CLICK]),
        ("pyautogui.click(x=10.9, y=20, button='right')", [Move(10, 20), *RIGHT]),
        ("pyautogui.click()", CLICK),
        ("pyautogui.rightClick(1, 2)", [Move(1, 2), *RIGHT]),
        ("pyautogui.moveTo(5, 6)", [Move(5, 6)]),
        ("pyautogui.moveRel(-5, 6)", [Move(-5, 6, is_relative=True)]),
        ("pyautogui.mouseDown(button='right'); pyautogui.mouseUp(button='right')", RIGHT),
        ("pyautogui.scroll(2)", WHEEL_UP * 2),
        ("pyautogui.scroll(-1, 3, 4)", [Move(3, 4), Button(5, True), Button(5, False)]),
        ("pyautogui.hscroll(1)", [Button(7, True), Button(7, False)]),
        ("pyautogui.press('enter')", tap("enter")),
        ("pyautogui.press(['a', 'b'], presses=2)", [*tap("a"), *tap("b")] * 2),
        ("pyautogui.hotkey('ctrl', 's')", CTRL_S),
        ("pyautogui.hotkey(['ctrl', 's'])", CTRL_S),
        ("pyautogui.keyDown('shift'); pyautogui.keyUp('shift')", tap("shift")),
        ("pyautogui.write('a<b é 你')", [Text("a<b é 你")]),
        ("pyautogui.typewrite('x\\ny')", [Text("x\ny")]),
        ("pyautogui.typewrite(['a', 'left'])", [*tap("a"), *tap("left")]),
        ("for _ in range(3):\n    pyautogui.press('down')", tap("down") * 3),
        ("", []),
    ],
)
def test_a_call_is_the_events_it_documents(code: str, expected: list[InputEvent]) -> None:
    events = compile_program(PREFIX + "\n" + code if code.startswith("for") else PREFIX + code, pause_s=0)
    assert [event for event in events if not isinstance(event, Pause)] == expected


def test_a_drag_holds_the_button_on_its_way() -> None:
    events = compile_program(PREFIX + "pyautogui.dragTo(100, 50, duration=0.4, button='left')", pause_s=0)
    press, move, release = [event for event in events if not isinstance(event, Pause)]
    assert (press, release) == (Button(1, True), Button(1, False))
    assert isinstance(move, Move) and (move.x_px, move.y_px, move.num_steps) == (100, 50, 100)


def test_each_call_is_followed_by_pyautoguis_pause_unless_the_program_sets_its_own() -> None:
    assert compile_program(PREFIX + "pyautogui.press('a')")[-1] == Pause(0.1)
    own = compile_program(PREFIX + "pyautogui.PAUSE = 0.5; pyautogui.press('a'); time.sleep(2)")
    assert [event for event in own if isinstance(event, Pause)] == [Pause(0.5), Pause(2.0)]


@pytest.mark.parametrize(
    "code",
    [
        "print(1)",
        "import os",
        "pyautogui.click(*place)",
        "x = pyautogui.position()",
        "pyautogui.locateOnScreen('a.png')",
        "pyautogui.click(pyautogui.position())",
        "for i in range(3): pyautogui.press(str(i))",
        "while True: pyautogui.press('a')",
        "if True: pyautogui.press('a')",
        "pyautogui.click(10, None)",
        "__import__('os').system('true')",
        "pyautogui.press('a'",
    ],
)
def test_more_than_a_list_of_calls_is_left_to_a_real_interpreter(code: str) -> None:
    with pytest.raises(NotUnderstoodError):
        compile_program(PREFIX + code)


def test_a_program_without_pyautogui_is_left_alone() -> None:
    with pytest.raises(NotUnderstoodError):
        compile_program("import time; time.sleep(1)")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("pyautogui.press('entr')", "unknown key"),
        ("pyautogui.click(1, 2, button='side')", "unknown mouse button"),
        ("time.sleep(1000)", "0..60"),
        ("pyautogui.click(1, 2, 3, 4, 5, 6, 7, 8, 9)", "click"),
        ("pyautogui.click(speed=3)", "speed"),
        ("pyautogui.scroll(100000)", "at most 200"),
        ("\nfor _ in range(1000):\n  for _ in range(1000):\n    pyautogui.press('a')", "input events"),
    ],
)
def test_arguments_that_cannot_be_played_are_named(code: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_program(PREFIX + code)
