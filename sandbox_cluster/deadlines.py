"""Nested deadlines: every layer gives the one below it less time than it has itself, so the innermost speaks first.

capture < host < gateway's call < client's call < the step as the caller sees it
"""

from __future__ import annotations

DEADLINE_HEADER = "x-deadline-s"
"""How long the caller will wait, less its own margin. Seconds, not a point in time: clocks may differ."""
MARGIN = 0.05
MIN_MARGIN_S = 0.2
MAX_MARGIN_S = 2.0


def tighter(timeout_s: float) -> float:
    """The time to give to the layer below one that has `timeout_s`: 5 % less, at least 0.2 s and at most 2 s less."""
    margin_s = min(MAX_MARGIN_S, max(MIN_MARGIN_S, MARGIN * timeout_s))
    return max(timeout_s - margin_s, timeout_s * 0.5)


def given(headers_value: str | None, default_s: float, most_s: float = 3600.0) -> float:
    """The deadline of a request from its header; `default_s` when it has none or a bad one."""
    try:
        value = float(headers_value) if headers_value else default_s
    except ValueError:
        return default_s
    return min(value, most_s) if value > 0 else default_s
