"""Foreign action formats as our actions: computer_13 (OSWorld), Anthropic's and OpenAI's computer use.

For demonstrations and agents of other makers. Positions there are pixels of the screenshot, so points come out in that space.
One foreign action may be several of ours, in order. What has no counterpart is refused with code "unsupported".
"""

from __future__ import annotations

from typing import Any

from rollout.actions.mending import Mender
from rollout.actions.values import read_keys, read_number, read_text
from slime_cua.core.actions import Action, GuiAction, GuiKind, TerminateAction
from slime_cua.core.coordinates import Point
from slime_cua.core.errors import ActionParseError

SCROLL_PIXELS_PER_CLICK = 100
"""OpenAI's scrolls are in pixels; a wheel click moves most pages by about this much."""
_CLICKS: dict[tuple[str, int], GuiKind] = {
    ("left", 1): "left_click",
    ("left", 2): "double_click",
    ("left", 3): "triple_click",
    ("right", 1): "right_click",
    ("middle", 1): "middle_click",
    ("wheel", 1): "middle_click",
}
_ANTHROPIC_POINTED: dict[str, GuiKind] = {
    "left_click": "left_click",
    "right_click": "right_click",
    "middle_click": "middle_click",
    "double_click": "double_click",
    "triple_click": "triple_click",
    "mouse_move": "mouse_move",
}


def pixel_point(x: Any, y: Any) -> Point:
    """A desktop pixel; range is checked where the screen is known."""
    return Point(x=read_number(x, "x"), y=read_number(y, "y"), space="pixels")


def click(button: Any, num_clicks: Any, point: Point | None, keys: tuple[str, ...] = ()) -> GuiAction:
    """A click of any button. Raises ActionParseError for one we do not have, or without a position."""
    is_named = isinstance(button, str) and isinstance(num_clicks, int)
    kind = _CLICKS.get((button, num_clicks)) if is_named else None
    if kind is None or point is None:
        raise unsupported(f"{num_clicks} clicks of the {button} button at {point}")
    return GuiAction(kind=kind, point=point, keys=keys)


def unsupported(what: str) -> ActionParseError:
    return ActionParseError("unsupported", f"no action of ours does this: {what[:80]}")


def from_computer_13(action: dict[str, Any] | str) -> list[Action]:
    """OSWorld's computer_13, e.g. {"action_type": "CLICK", "x": 10, "y": 20} or "DONE".

    Arguments may also stand under "parameters". Source: OSWorld, desktop_env/actions.py (names and arguments).
    """
    action = {"action_type": action} if isinstance(action, str) else action
    kind = _name(action, "action_type")
    parameters = action.get("parameters")
    given = {**action, **parameters} if isinstance(parameters, dict) else action
    if kind in ("DONE", "FAIL"):
        return [TerminateAction(status="success" if kind == "DONE" else "failure")]
    if kind == "WAIT":
        return [GuiAction(kind="wait", time_s=1.0)]
    point = pixel_point(given["x"], given["y"]) if "x" in given and "y" in given else None
    if kind == "CLICK":
        return [click(given.get("button", "left"), given.get("num_clicks", 1), point)]
    if kind in ("RIGHT_CLICK", "DOUBLE_CLICK"):
        return [click("right" if kind == "RIGHT_CLICK" else "left", 1 + (kind == "DOUBLE_CLICK"), point)]
    if kind in ("MOVE_TO", "DRAG_TO") and point is not None:
        return [GuiAction(kind="mouse_move" if kind == "MOVE_TO" else "left_click_drag", point=point)]
    if kind == "SCROLL":
        return scrolls(given.get("dx", 0), given.get("dy", 0), None)
    if kind == "TYPING":
        return [GuiAction(kind="type", text=read_text(given.get("text"), "text"))]
    if kind == "PRESS":
        return [GuiAction(kind="key", keys=read_keys([given.get("key")], Mender()))]
    if kind == "HOTKEY":
        return [GuiAction(kind="key", keys=read_keys(given.get("keys"), Mender()))]
    raise unsupported(f"computer_13 {kind}")


def scrolls(right: Any, up: Any, point: Point | None) -> list[Action]:
    """Wheel clicks on one or both axes; at least one of them not 0."""
    horizontal, vertical = round(read_number(right, "dx")), round(read_number(up, "dy"))
    found: list[Action] = []
    if vertical:
        found.append(GuiAction(kind="scroll", scroll_clicks=vertical, point=point))
    if horizontal:
        found.append(GuiAction(kind="hscroll", scroll_clicks=horizontal, point=point))
    if not found:
        raise unsupported("a scroll by nothing")
    return found


def from_anthropic(given: dict[str, Any]) -> list[Action]:
    """The input of Anthropic's computer tool, e.g. {"action": "left_click", "coordinate": [10, 20]}."""
    action = _name(given, "action")
    point = _pair(given["coordinate"]) if given.get("coordinate") is not None else None
    if action in _ANTHROPIC_POINTED and point is not None:
        held = read_keys(given["text"], Mender(is_lenient=True)) if given.get("text") else ()
        return [GuiAction(kind=_ANTHROPIC_POINTED[action], point=point, keys=held)]
    if action == "left_click_drag" and point is not None:
        start = given.get("start_coordinate")
        before: list[Action] = [GuiAction(kind="mouse_move", point=_pair(start))] if start is not None else []
        return [*before, GuiAction(kind="left_click_drag", point=point)]
    if action == "key":
        return [GuiAction(kind="key", keys=read_keys(given.get("text"), Mender(is_lenient=True)))]
    if action == "type":
        return [GuiAction(kind="type", text=read_text(given.get("text"), "text"))]
    if action == "wait":
        return [GuiAction(kind="wait", time_s=read_number(given.get("duration", 1), "duration"))]
    if action == "screenshot":
        return [GuiAction(kind="screenshot")]
    if action == "scroll":
        amount = read_number(given.get("scroll_amount"), "scroll_amount")
        signs = {"up": (0, 1), "down": (0, -1), "right": (1, 0), "left": (-1, 0)}
        sign = signs.get(str(given.get("scroll_direction")))
        if sign is not None:
            return scrolls(sign[0] * amount, sign[1] * amount, point)
    raise unsupported(f"Anthropic {action}")


def from_openai(given: dict[str, Any]) -> list[Action]:
    """The action of OpenAI's computer_call, e.g. {"type": "click", "button": "left", "x": 10, "y": 20}."""
    kind = _name(given, "type")
    point = pixel_point(given["x"], given["y"]) if "x" in given and "y" in given else None
    if kind in ("click", "double_click"):
        held = read_keys(given["keys"], Mender()) if given.get("keys") else ()
        return [click(given.get("button", "left"), 1 + (kind == "double_click"), point, held)]
    if kind == "move" and point is not None:
        return [GuiAction(kind="mouse_move", point=point)]
    if kind == "scroll":
        steps = [
            read_number(given.get(name, 0), name) / SCROLL_PIXELS_PER_CLICK
            for name in ("scroll_x", "scroll_y")
        ]
        right, down = (
            0 if step == 0 else max(1, round(abs(step))) * (1 if step > 0 else -1) for step in steps
        )
        return scrolls(right, -down, point)
    if kind == "type":
        return [GuiAction(kind="type", text=read_text(given.get("text"), "text"))]
    if kind == "keypress":
        return [GuiAction(kind="key", keys=read_keys(given.get("keys"), Mender()))]
    if kind == "wait":
        return [GuiAction(kind="wait", time_s=1.0)]
    if kind == "screenshot":
        return [GuiAction(kind="screenshot")]
    if kind == "drag":
        path = [
            pixel_point(at.get("x"), at.get("y")) for at in given.get("path") or () if isinstance(at, dict)
        ]
        if len(path) >= 2:
            return [
                GuiAction(kind="mouse_move", point=path[0]),
                GuiAction(kind="left_click_drag", point=path[-1]),
            ]
    raise unsupported(f"OpenAI {kind}")


def _name(given: dict[str, Any], key: str) -> str:
    name = given.get(key)
    if not isinstance(name, str):
        raise ActionParseError("unknown_action", f"{key!r} must name an action")
    return name


def _pair(value: Any) -> Point:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ActionParseError("bad_coordinate", "coordinate must be [x, y]")
    return pixel_point(*value)
