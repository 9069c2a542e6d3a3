"""Strict or lenient, decided in one place."""

from __future__ import annotations

from slime_cua.core.errors import ActionParseError


class Mender:
    """Takes each fault that could be mended: strict raises it, lenient writes it down and lets the reader go on."""

    def __init__(self, is_lenient: bool = False) -> None:
        self.is_lenient = is_lenient
        self.repairs: list[str] = []

    def allow(self, code: str, message: str) -> None:
        """Raise ActionParseError(code, message), or record `code` as a repair."""
        if not self.is_lenient:
            raise ActionParseError(code, message)
        self.repairs.append(code)
