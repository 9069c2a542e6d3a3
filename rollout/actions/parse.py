"""From the text of a response to typed actions. One strict parser trains; the lenient one is for evaluation."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from rollout.actions.grammar import ToolCall, tool_calls
from rollout.actions.mending import Mender
from rollout.actions.schema import FIELDS, SKILL_FIELDS, VERBS, choices_of, verbs_of
from rollout.actions.space import COMPUTER_TOOL, EVERYTHING, SKILL_TOOL, ActionSpace
from rollout.actions.values import read_gui, read_text
from slime_cua.core.actions import Action, CodeAction, McpAction, SkillAction, TerminateAction
from slime_cua.core.errors import ActionParseError

_TOOL_ALIASES = (COMPUTER_TOOL, "computer_use", "computer")
_VERB_ALIASES = {
    "click": "left_click",
    "hotkey": "key",
    "press": "key",
    "move": "mouse_move",
    "drag": "left_click_drag",
}


@dataclass(frozen=True)
class LenientResult:
    """What a lenient reading found and what it mended, by code, e.g. ("unclosed_call",)."""

    actions: list[Action]
    repairs: tuple[str, ...]


def parse(text: str | bytes, family: str | None = None, space: ActionSpace | None = None) -> Action:
    """The one action of a response. `family` defaults to the space's, `space` to every action of ours.

    Raises ActionParseError, and nothing else, for every text that is no valid response in `space`; ValueError for an
    unknown family.
    """
    space = space or EVERYTHING
    (action,) = _parse(text, family, replace(space, max_calls=1), Mender())
    return action


def parse_all(text: str | bytes, family: str | None = None, space: ActionSpace | None = None) -> list[Action]:
    """As `parse`, for spaces that allow several calls a response: 1 to `space.max_calls` actions in order."""
    return _parse(text, family, space or EVERYTHING, Mender())


def parse_lenient(
    text: str | bytes, family: str | None = None, space: ActionSpace | None = None
) -> LenientResult:
    """As `parse_all`, but mends what has one plain meaning and says what it mended. For evaluation only."""
    mender = Mender(is_lenient=True)
    actions = _parse(text, family, space or EVERYTHING, mender)
    return LenientResult(actions, tuple(mender.repairs))


def error_text(error: ActionParseError) -> str:
    """What the policy is told about its response, as an observation."""
    return f"invalid action ({error.code}): {error}"


def _parse(text: str | bytes, family: str | None, space: ActionSpace, mender: Mender) -> list[Action]:
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    calls = tool_calls(text, family or space.family, mender)
    if len(calls) > space.max_calls:
        mender.allow("several_calls", f"one response may hold {space.max_calls} call, not {len(calls)}")
        calls = calls[: space.max_calls]
    return [_action(call, space, mender) for call in calls]


def _action(call: ToolCall, space: ActionSpace, mender: Mender) -> Action:
    if call.name in space.computer_tools:
        return _computer(call, space, mender)
    if call.name == SKILL_TOOL and "skill" in space.actions:
        return _skill(call, mender)
    if (tool := space.mcp_tool(call.name)) is not None:
        return McpAction(name=call.name, arguments=_mcp_arguments(call, tool.parameters))
    message = f"there is no tool {call.name[:60]!r}; use {space.computer_tools[0]}"
    if call.name in _TOOL_ALIASES:
        mender.allow("unknown_tool", message)
        return _computer(call, space, mender)
    raise ActionParseError("unknown_tool", message)


def _computer(call: ToolCall, space: ActionSpace, mender: Mender) -> Action:
    arguments = dict(call.arguments)
    verb = _verb(arguments.pop("action", None), space, mender)
    if call.is_text:
        arguments = {name: _typed(name, text) for name, text in arguments.items()}
    spec = VERBS[verb]
    for name in [name for name in arguments if name not in (*spec.needs, *spec.may_have)]:
        code = "unexpected_field" if name in FIELDS else "unknown_field"
        mender.allow(code, f"action={verb} takes no {name[:40]!r}")
        del arguments[name]
    for name in spec.needs:
        if name not in arguments:
            raise ActionParseError("missing_field", f"action={verb} needs {name!r}")
    if spec.group == "gui":
        return read_gui(verb, arguments, mender)
    if spec.group == "code":
        language: Any = _choice("language", arguments["language"], choices_of("language", space))
        return CodeAction(language=language, code=_not_empty("execute_code", arguments["execute_code"]))
    status: Any = _choice("status", arguments["status"], choices_of("status", space))
    return TerminateAction(status=status, answer=read_text(arguments.get("text", ""), "text"))


def _verb(value: Any, space: ActionSpace, mender: Mender) -> str:
    offered = verbs_of(space)
    if isinstance(value, str):
        if value not in VERBS and value in _VERB_ALIASES:
            mender.allow("unknown_action", f"unknown action {value!r}; use {_VERB_ALIASES[value]!r}")
            value = _VERB_ALIASES[value]
        if value in offered:
            return value
        if value in VERBS:
            raise ActionParseError(
                "action_not_offered", f"action={value} is not offered here; use {', '.join(offered)}"
            )
    raise ActionParseError("unknown_action", f"action must be one of {', '.join(offered)}")


def _skill(call: ToolCall, mender: Mender) -> SkillAction:
    arguments = dict(call.arguments)
    for name in [name for name in arguments if name not in SKILL_FIELDS]:
        mender.allow("unknown_field", f"{SKILL_TOOL} takes no {name[:40]!r}")
        del arguments[name]
    if "route" not in arguments:
        raise ActionParseError("missing_field", f"{SKILL_TOOL} needs 'route'")
    route: Any = _choice("route", arguments["route"], SKILL_FIELDS["route"].choices)
    return SkillAction(route=route, query=read_text(arguments.get("query", ""), "query"))


def _typed(name: str, text: str) -> Any:
    """A parameter's text by the field's type; what is not JSON stays text, for the reader of the field to judge."""
    field = FIELDS.get(name)
    if field is None or field.json_type == "string":
        return text
    return _json_or_text(text)


def _mcp_arguments(call: ToolCall, schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    arguments = call.arguments
    if call.is_text:
        text_names = {name for name, spec in properties.items() if spec.get("type") == "string"}
        arguments = {
            name: text if name in text_names or name not in properties else _json_or_text(text)
            for name, text in arguments.items()
        }
    for name in schema.get("required") or ():
        if name not in arguments:
            raise ActionParseError("missing_field", f"{call.name} needs {name!r}")
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ActionParseError("bad_text", f"the arguments of {call.name} cannot be sent as JSON") from error
    return arguments


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ActionParseError("bad_choice", f"{name} must be one of {', '.join(choices)}")
    return value


def _not_empty(name: str, value: Any) -> str:
    text = read_text(value, name)
    if not text.strip():
        raise ActionParseError("bad_text", f"{name} is empty")
    return text
