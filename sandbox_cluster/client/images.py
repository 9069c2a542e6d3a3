"""A screenshot is believed only after it was decoded in full and has the size it should have."""

from __future__ import annotations

import hashlib

from sandbox_cluster.guest.png import check_png
from slime_cua.core.errors import SandboxError


def checked(png: bytes, wh_px: tuple[int, int], sha256: str = "") -> bytes:
    """`png` itself. Raises SandboxError: cut off, not of size `wh_px`, or other bytes than `sha256` says."""
    if sha256 and hashlib.sha256(png).hexdigest() != sha256:
        raise SandboxError("the screenshot was damaged on its way: its SHA-256 differs")
    try:
        check_png(png, wh_px)
    except ValueError as error:
        raise SandboxError(f"the screenshot cannot be used: {error}") from None
    return png
