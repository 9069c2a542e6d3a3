"""What a tool call gives back to the policy, and what it says of itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_RESULT_CHARS = 1500
"""Source: hybrid-routing-agent cuts results there."""
CUT = " [cut]"
_EFFECT_KEYS = ("num_effects", "num_changes", "num_replacements", "affected", "changed")
_EFFECT_TEXT = re.compile(
    r"\b([0-9]{1,9}) (?:replacement|change|cell|row|column|file|item|match|occurrence|slide|paragraph)", re.I
)


@dataclass(frozen=True)
class ToolResult:
    """Example: ToolResult("Replaced: 0 replacements made", is_success=False, num_effects=0)."""

    text: str
    is_success: bool
    """The tool reported no error, and did not say that it changed nothing."""
    num_effects: int | None = None
    """How many things it says it changed; None where it does not say."""


def tool_result(text: str, is_error: bool, structured: Mapping[str, Any] | None = None) -> ToolResult:
    """The result of a call: text cut to MAX_RESULT_CHARS, success, and effect count.

    A tool can answer without an error and have done nothing; then it did not succeed, and the text says so at its end.
    """
    num_effects = _effects(text, structured or {})
    is_idle = not is_error and num_effects == 0
    note = " [nothing was changed]" if is_idle else ""
    return ToolResult(
        cut_text(text, MAX_RESULT_CHARS - len(note)) + note, not is_error and not is_idle, num_effects
    )


def cut_text(text: str, max_chars: int = MAX_RESULT_CHARS) -> str:
    """`text`, or its beginning with a mark that it was cut; never longer than `max_chars`."""
    return text if len(text) <= max_chars else text[: max_chars - len(CUT)] + CUT


def _effects(text: str, structured: Mapping[str, Any]) -> int | None:
    for key in _EFFECT_KEYS:
        value = structured.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    said = _EFFECT_TEXT.search(text)
    return int(said.group(1)) if said else None
