"""Action space: definitions, prompts and schemas made from them, the strict parser, and its inverse."""

from rollout.actions.parse import LenientResult, error_text, parse, parse_all, parse_lenient
from rollout.actions.prompts import system_prompt
from rollout.actions.schema import tool_schemas
from rollout.actions.space import ActionSpace, McpTool
from rollout.actions.write import format_action

__all__ = [
    "ActionSpace",
    "LenientResult",
    "McpTool",
    "error_text",
    "format_action",
    "parse",
    "parse_all",
    "parse_lenient",
    "system_prompt",
    "tool_schemas",
]
