"""Foreign action formats become our actions, or are refused by name."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.actions.import_pyautogui import from_pyautogui
from rollout.actions.import_vendors import from_anthropic, from_computer_13, from_openai
from slime_cua.core.actions import GuiAction, TerminateAction
from slime_cua.core.coordinates import Point
from slime_cua.core.errors import ActionParseError

AT = Point(x=10, y=20, space="pixels")
TO = Point(x=30, y=40, space="pixels")


@pytest.mark.parametrize(
    ("code", "actions"),
    [
        ("DONE", [TerminateAction(status="success")]),
        ("FAIL", [TerminateAction(status="failure")]),
        ("WAIT", [GuiAction(kind="wait", time_s=1.0)]),
        ("pyautogui.click(10, 20)", [GuiAction(kind="left_click", point=AT)]),
        ("pyautogui.click(x=10, y=20, button='right')", [GuiAction(kind="right_click", point=AT)]),
        ("pyautogui.click(10, 20, clicks=3)", [GuiAction(kind="triple_click", point=AT)]),
        ("pyautogui.doubleClick((10, 20))", [GuiAction(kind="double_click", point=AT)]),
        (
            "import pyautogui, time\npyautogui.FAILSAFE = False\npyautogui.moveTo(10, 20)\npyautogui.dragTo(30, 40, duration=1)",
            [GuiAction(kind="mouse_move", point=AT), GuiAction(kind="left_click_drag", point=TO)],
        ),
        ("pyautogui.typewrite('a<b', interval=0.1)", [GuiAction(kind="type", text="a<b")]),
        (
            "pyautogui.hotkey('ctrl', 's'); time.sleep(0.5)",
            [GuiAction(kind="key", keys=("ctrl", "s")), GuiAction(kind="wait", time_s=0.5)],
        ),
        ("pyautogui.press('enter', presses=2)", [GuiAction(kind="key", keys=("enter",))] * 2),
        (
            "pyautogui.press(['up', 'a'])",
            [GuiAction(kind="key", keys=("up",)), GuiAction(kind="key", keys=("a",))],
        ),
        ("pyautogui.scroll(-5, 10, 20)", [GuiAction(kind="scroll", scroll_clicks=-5, point=AT)]),
    ],
)
def test_pyautogui_calls_are_read(code: str, actions: list[Any]) -> None:
    assert from_pyautogui(code) == actions


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("", "bad_code"),
        ("import os", "bad_code"),
        ("os.system('rm -rf /')", "unsupported"),
        ("pyautogui.click(*[1, 2])", "bad_code"),
        ("pyautogui.click(__import__('os').getpid(), 2)", "bad_code"),
        ("x = 5", "bad_code"),
        ("for i in range(3): pyautogui.click(1, 2)", "bad_code"),
        ("pyautogui.click(", "bad_code"),
        ("pyautogui.click()", "unsupported"),
        ("pyautogui.keyDown('ctrl')", "unsupported"),
        ("pyautogui.click('a', 'b')", "bad_number"),
        ("pyautogui.press('nokey')", "bad_keys"),
        ("pyautogui.click(" + "(" * 5000, "bad_code"),
    ],
)
def test_other_code_is_refused_and_never_run(code: str, name: str) -> None:
    with pytest.raises(ActionParseError) as caught:
        from_pyautogui(code)
    assert caught.value.code == name


@pytest.mark.parametrize(
    ("reader", "given_action", "actions"),
    [
        (
            from_computer_13,
            {"action_type": "CLICK", "parameters": {"x": 10, "y": 20, "num_clicks": 2}},
            [GuiAction(kind="double_click", point=AT)],
        ),
        (
            from_computer_13,
            {"action_type": "SCROLL", "dx": 0, "dy": -3},
            [GuiAction(kind="scroll", scroll_clicks=-3)],
        ),
        (
            from_computer_13,
            {"action_type": "HOTKEY", "keys": ["ctrl", "c"]},
            [GuiAction(kind="key", keys=("ctrl", "c"))],
        ),
        (from_computer_13, "DONE", [TerminateAction(status="success")]),
        (
            from_anthropic,
            {"action": "left_click", "coordinate": [10, 20], "text": "shift"},
            [GuiAction(kind="left_click", point=AT, keys=("shift",))],
        ),
        (
            from_anthropic,
            {"action": "left_click_drag", "start_coordinate": [10, 20], "coordinate": [30, 40]},
            [GuiAction(kind="mouse_move", point=AT), GuiAction(kind="left_click_drag", point=TO)],
        ),
        (
            from_anthropic,
            {"action": "key", "text": "ctrl+Page_Down"},
            [GuiAction(kind="key", keys=("ctrl", "pagedown"))],
        ),
        (
            from_anthropic,
            {"action": "scroll", "coordinate": [10, 20], "scroll_direction": "down", "scroll_amount": 3},
            [GuiAction(kind="scroll", scroll_clicks=-3, point=AT)],
        ),
        (
            from_openai,
            {"type": "click", "button": "wheel", "x": 10, "y": 20},
            [GuiAction(kind="middle_click", point=AT)],
        ),
        (
            from_openai,
            {"type": "scroll", "x": 10, "y": 20, "scroll_x": 0, "scroll_y": 320},
            [GuiAction(kind="scroll", scroll_clicks=-3, point=AT)],
        ),
        (
            from_openai,
            {"type": "keypress", "keys": ["CTRL", "L"]},
            [GuiAction(kind="key", keys=("ctrl", "l"))],
        ),
        (
            from_openai,
            {"type": "drag", "path": [{"x": 10, "y": 20}, {"x": 15, "y": 30}, {"x": 30, "y": 40}]},
            [GuiAction(kind="mouse_move", point=AT), GuiAction(kind="left_click_drag", point=TO)],
        ),
    ],
)
def test_actions_of_other_makers_are_read(reader: Any, given_action: Any, actions: list[Any]) -> None:
    assert reader(given_action) == actions


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
NAMES = [
    "action",
    "type",
    "action_type",
    "x",
    "y",
    "coordinate",
    "start_coordinate",
    "keys",
    "text",
    "key",
    "path",
    "button",
]
NAMES += ["num_clicks", "dx", "dy", "scroll_x", "scroll_y", "scroll_direction", "scroll_amount", "duration"]
KINDS = [
    "click",
    "CLICK",
    "left_click",
    "scroll",
    "SCROLL",
    "drag",
    "key",
    "PRESS",
    "HOTKEY",
    "wait",
    "left_click_drag",
    "keypress",
]


@given(st.dictionaries(st.sampled_from(NAMES), JSON | st.sampled_from(KINDS)), st.sampled_from(KINDS))
def test_no_foreign_action_crashes_a_reader(fields: dict[str, Any], kind: str) -> None:
    for reader, name in (
        (from_computer_13, "action_type"),
        (from_anthropic, "action"),
        (from_openai, "type"),
    ):
        try:
            reader({**fields, name: kind})
        except ActionParseError as error:
            assert error.code


@given(st.text())
def test_no_text_crashes_the_reader_of_code(code: str) -> None:
    try:
        from_pyautogui(code)
    except ActionParseError as error:
        assert error.code
