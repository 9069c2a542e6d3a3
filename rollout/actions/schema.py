"""The definitions of the action space: fields, verbs, and the tool schemas that are made from them.

The parser reads calls by these tables and the prompts show what is generated from them, so neither can promise what the
other does not keep. Names and meaning are OS-Helix' `custom_computer_use` (appendix G.1); the descriptions are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rollout.actions.space import SKILL_TOOL, ActionSpace

JsonType = Literal["string", "number", "array", "object"]
SKILL_ROUTES = ("DIRECT", "QUERY_TEXT", "QUERY_IMAGE", "QUERY_BOTH")


@dataclass(frozen=True)
class FieldSpec:
    """One argument of the computer tool."""

    json_type: JsonType
    description: str
    choices: tuple[str, ...] = ()
    items: dict[str, Any] | None = None


@dataclass(frozen=True)
class VerbSpec:
    """One value of `action`: the arguments it needs and those it may have."""

    group: Literal["gui", "code", "terminate"]
    needs: tuple[str, ...] = ()
    may_have: tuple[str, ...] = ()


FIELDS: dict[str, FieldSpec] = {
    "keys": FieldSpec(
        "array",
        "Keys pressed together for action=key, held down during a click. Example: ['ctrl', 's'].",
        items={"type": "string"},
    ),
    "text": FieldSpec("string", "What to type for action=type, the answer for action=terminate."),
    "coordinate": FieldSpec(
        "array", "[x, y] of a mouse action, 0 to 1000 on both axes.", items={"type": "number"}
    ),
    "pixels": FieldSpec("number", "Wheel steps: positive is up for scroll and right for hscroll."),
    "time": FieldSpec("number", "Seconds to wait."),
    "status": FieldSpec(
        "string", "How the task ended, for action=terminate.", choices=("success", "failure")
    ),
    "execute_code": FieldSpec("string", "The program for action=code; it runs in a fresh process."),
    "language": FieldSpec("string", "Language of execute_code.", choices=("python", "bash")),
}
"""Arguments besides `action`, in the order in which prompts show them."""

_POINT: tuple[str, ...] = ("coordinate",)
VERBS: dict[str, VerbSpec] = {
    "key": VerbSpec("gui", ("keys",)),
    "type": VerbSpec("gui", ("text",)),
    "mouse_move": VerbSpec("gui", _POINT),
    "left_click": VerbSpec("gui", _POINT, ("keys",)),
    "left_click_drag": VerbSpec("gui", _POINT, ("keys",)),
    "right_click": VerbSpec("gui", _POINT, ("keys",)),
    "middle_click": VerbSpec("gui", _POINT, ("keys",)),
    "double_click": VerbSpec("gui", _POINT, ("keys",)),
    "triple_click": VerbSpec("gui", _POINT, ("keys",)),
    "scroll": VerbSpec("gui", ("pixels",), _POINT),
    "hscroll": VerbSpec("gui", ("pixels",), _POINT),
    "wait": VerbSpec("gui", (), ("time",)),
    "terminate": VerbSpec("terminate", ("status",), ("text",)),
    "code": VerbSpec("code", ("execute_code", "language")),
}
"""The values of `action`, in the order in which prompts show them."""

SKILL_FIELDS: dict[str, FieldSpec] = {
    "route": FieldSpec("string", "Which kind of skill to look up.", choices=SKILL_ROUTES),
    "query": FieldSpec("string", "What you need to know how to do."),
}


def verbs_of(space: ActionSpace) -> dict[str, VerbSpec]:
    """The verbs that `space` accepts, in order."""
    accepted = {*space.actions, "terminate"}
    return {name: verb for name, verb in VERBS.items() if verb.group in accepted}


def choices_of(name: str, space: ActionSpace) -> tuple[str, ...]:
    """The values that a field may take in `space`; empty means any."""
    return space.languages if name == "language" else FIELDS[name].choices


def tool_schemas(space: ActionSpace) -> list[dict[str, Any]]:
    """The tools as a chat template takes them: the computer tool, the skill library if offered, the MCP tools."""
    tools = [_computer_schema(space)]
    if "skill" in space.actions:
        properties = {name: _property(spec, spec.choices) for name, spec in SKILL_FIELDS.items()}
        tools.append(
            _function(SKILL_TOOL, "Look up how a task is done. It changes nothing.", properties, ["route"])
        )
    if "mcp" in space.actions:
        for tool in space.mcp_tools:
            body = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            tools.append({"type": "function", "function": body})
    return tools


def _computer_schema(space: ActionSpace) -> dict[str, Any]:
    verbs = verbs_of(space)
    used = {name for verb in verbs.values() for name in (*verb.needs, *verb.may_have)}
    action = {"type": "string", "enum": list(verbs), "description": "What to do."}
    properties = {
        name: _property(spec, choices_of(name, space)) for name, spec in FIELDS.items() if name in used
    }
    description = "Use the mouse and the keyboard of a desktop, wait, and end the task."
    if "code" in space.actions:
        description = "Use the mouse and the keyboard of a desktop, run code on it, wait, and end the task."
    return _function(space.computer_tools[0], description, {"action": action, **properties}, ["action"])


def _function(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _property(spec: FieldSpec, choices: tuple[str, ...]) -> dict[str, Any]:
    shown: dict[str, Any] = {"type": spec.json_type, "description": spec.description}
    if choices:
        shown["enum"] = list(choices)
    if spec.items is not None:
        shown["items"] = spec.items
    return shown
