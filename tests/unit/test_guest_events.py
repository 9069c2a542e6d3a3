"""GUI actions become the events that a hand would make; what cannot be played is refused before anything moves."""

from __future__ import annotations

import pytest

from sandbox_cluster.guest.events import (
    Button,
    Key,
    Move,
    Pause,
    Text,
    compile_action,
    compile_actions,
)
from sandbox_cluster.guest.keys import keysym_of, keysym_of_char
from sandbox_cluster.providers.desktop import argv_of
from slime_cua.core.actions import GuiAction
from slime_cua.core.coordinates import Point

SIZE = (1000, 500)
MIDDLE = Point(x=500, y=500)


def without_pauses(action: GuiAction) -> list[object]:
    return [event for event in compile_action(action, SIZE) if not isinstance(event, Pause)]


def test_a_click_moves_to_the_pixel_then_presses_and_releases() -> None:
    events = compile_action(GuiAction(kind="left_click", point=MIDDLE), SIZE)
    assert events == [Move(500, 250), Button(1, True), Button(1, False)]


@pytest.mark.parametrize(
    ("kind", "number", "count"),
    [
        ("left_click", 1, 1),
        ("right_click", 3, 1),
        ("middle_click", 2, 1),
        ("double_click", 1, 2),
        ("triple_click", 1, 3),
    ],
)
def test_clicks_have_their_button_and_count(kind: str, number: int, count: int) -> None:
    events = without_pauses(GuiAction(kind=kind, point=MIDDLE))  # type: ignore[arg-type]
    assert events[1:] == [Button(number, True), Button(number, False)] * count


def test_keys_are_held_during_a_click_and_released_in_reverse() -> None:
    events = without_pauses(GuiAction(kind="left_click", point=MIDDLE, keys=("ctrl", "shift")))
    assert events[:2] == [Key("ctrl", True), Key("shift", True)]
    assert events[-2:] == [Key("shift", False), Key("ctrl", False)]


def test_a_drag_presses_where_the_pointer_is_and_releases_at_the_point() -> None:
    press, move, release = without_pauses(GuiAction(kind="left_click_drag", point=MIDDLE))
    assert (press, release) == (Button(1, True), Button(1, False))
    assert isinstance(move, Move) and (move.x_px, move.y_px) == (500, 250) and move.num_steps > 1


@pytest.mark.parametrize(
    ("kind", "clicks", "number"),
    [("scroll", 2, 4), ("scroll", -3, 5), ("hscroll", 1, 7), ("hscroll", -2, 6)],
)
def test_scrolling_is_wheel_clicks_up_and_right_for_positive(kind: str, clicks: int, number: int) -> None:
    events = without_pauses(GuiAction(kind=kind, scroll_clicks=clicks))  # type: ignore[arg-type]
    assert events == [Button(number, True), Button(number, False)] * abs(clicks)


def test_a_wait_is_a_pause_and_a_screenshot_is_no_event() -> None:
    actions = [
        GuiAction(kind="wait", time_s=1.5),
        GuiAction(kind="screenshot"),
        GuiAction(kind="type", text="a"),
    ]
    events = compile_actions(actions, SIZE)
    assert events == (Pause(1.5), Text("a"))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (GuiAction(kind="left_click"), "needs a point"),
        (GuiAction(kind="left_click", point=Point(x=1001, y=0)), "outside grid1000"),
        (GuiAction(kind="type"), "needs text"),
        (GuiAction(kind="type", text="a\x00b"), r"U\+0000"),
        (GuiAction(kind="type", text="x" * 20_001), "20001 characters"),
        (GuiAction(kind="key"), "needs keys"),
        (GuiAction(kind="key", keys=("cntrl",)), "did you mean"),
        (GuiAction(kind="wait", time_s=float("nan")), "0..60"),
        (GuiAction(kind="wait", time_s=-1), "0..60"),
        (GuiAction(kind="scroll", scroll_clicks=10_000), "at most 200"),
    ],
)
def test_what_cannot_be_played_is_refused_with_its_place(action: GuiAction, message: str) -> None:
    with pytest.raises(ValueError, match=f"action 1 .*{message}"):
        compile_actions([GuiAction(kind="screenshot"), action], SIZE)


@pytest.mark.parametrize(
    ("name", "keysym"),
    [
        ("ctrl", 0xFFE3), ("Ctrl", 0xFFE3), ("Control_R", 0xFFE4), ("enter", 0xFF0D), ("Page_Down", 0xFF56), ("pgdn", 0xFF56),
        ("f5", 0xFFC2), ("F12", 0xFFC9), ("a", 0x61), ("A", 0x41), ("+", 0x2B), ("é", 0xE9), ("€", 0x010020AC), ("win", 0xFFEB),
        ("space", 0x20), (" ", 0x20), ("plus", 0x2B), ("num5", 0xFFB5), ("\n", 0xFF0D),
    ],
)  # fmt: skip
def test_key_names_are_the_x_keysyms_of_keysymdef(name: str, keysym: int) -> None:
    assert keysym_of(name) == keysym


def test_characters_beyond_latin_1_are_unicode_keysyms() -> None:
    assert [keysym_of_char(char) for char in "zß你😀"] == [0x7A, 0xDF, 0x01004F60, 0x0101F600]


def test_commands_are_read_as_osworlds_server_reads_them() -> None:
    assert argv_of("ls -l 'a b'", False) == ("ls", "-l", "a b")
    assert argv_of("ls | wc", True) == ("/bin/sh", "-c", "ls | wc")
    assert argv_of(["cat", "~/x", "a~/b"], False) == ("cat", "/home/user/x", "a~/b")
    assert argv_of(["echo $0", "one"], True) == ("/bin/sh", "-c", "echo $0", "one")
    with pytest.raises(ValueError, match="empty"):
        argv_of("", False)
