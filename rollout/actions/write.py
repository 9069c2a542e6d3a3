"""From a typed action to the text of a call: what demonstrations show and what `parse` reads back to the same action."""

from __future__ import annotations

import json
from typing import Any

from rollout.actions.space import COMPUTER_TOOL, SKILL_TOOL
from slime_cua.core.actions import Action, CodeAction, GuiAction, McpAction, SkillAction


def format_action(action: Action, family: str = "qwen_json", computer_tool: str = COMPUTER_TOOL) -> str:
    """The call for `action`, from <tool_call> to </tool_call>, in the order of keys that prompts show.

    Raises ValueError for an action the tool cannot express (a point in pixels, a screenshot) and for an unknown family.
    """
    name, arguments = _call_of(action, computer_tool)
    if family in ("qwen_json", "qwen"):
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"
    if family == "qwen_xml":
        parameters = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
    raise ValueError(f"unknown family {family!r}; known: qwen_json, qwen_xml")


def _call_of(action: Action, computer_tool: str) -> tuple[str, dict[str, Any]]:
    if isinstance(action, GuiAction):
        return computer_tool, _gui_arguments(action)
    if isinstance(action, CodeAction):
        return computer_tool, {"action": "code", "language": action.language, "execute_code": action.code}
    if isinstance(action, McpAction):
        return action.name, action.arguments
    if isinstance(action, SkillAction):
        return SKILL_TOOL, {"route": action.route, **({"query": action.query} if action.query else {})}
    answer = {"text": action.answer} if action.answer else {}
    return computer_tool, {"action": "terminate", "status": action.status, **answer}


def _gui_arguments(action: GuiAction) -> dict[str, Any]:
    if action.kind == "screenshot":
        raise ValueError("the computer tool has no action for a screenshot; use wait")
    arguments: dict[str, Any] = {"action": action.kind}
    if action.point is not None:
        if action.point.space != "grid1000":
            raise ValueError("a call needs a grid point; convert with core.coordinates.to_grid")
        arguments["coordinate"] = [_plain(action.point.x), _plain(action.point.y)]
    if action.text is not None:
        arguments["text"] = action.text
    if action.keys:
        arguments["keys"] = list(action.keys)
    if action.scroll_clicks:
        arguments["pixels"] = action.scroll_clicks
    if action.kind == "wait":
        arguments["time"] = _plain(action.time_s)
    return arguments


def _plain(value: float) -> int | float:
    return int(value) if value == int(value) else value
