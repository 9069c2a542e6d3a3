"""What the tests of real local desktops share: booting them, acting, and looking for what is left."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import textwrap
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from sandbox_cluster.api import ExecuteReply, ExecuteRequest, Settle, StepRequest
from sandbox_cluster.providers.base import Capture
from sandbox_cluster.providers.desktop import Desktop
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.actions import CodeAction, GuiAction
from slime_cua.core.coordinates import Point

FIRST_UID = 61500
PATIENT = Settle(quiet_ms=200, max_ms=5000)
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="a host user per slot needs root")


def config(**changes: object) -> DesktopConfig:
    return DesktopConfig(
        **{"screen_wh_px": (640, 384), "first_uid": FIRST_UID, "boot_timeout_s": 120, **changes}
    )


async def do(desktop: Desktop, *actions: GuiAction, settle: Settle = PATIENT) -> Capture:
    return await desktop.step(StepRequest(action_id=uuid.uuid4().hex, actions=actions, settle=settle))


async def code(desktop: Desktop, text: str, language: str = "bash", timeout_s: float = 20.0) -> ExecuteReply:
    action = CodeAction(language=language, code=textwrap.dedent(text))  # type: ignore[arg-type]
    return await desktop.execute(
        ExecuteRequest(action_id=uuid.uuid4().hex, action=action, timeout_s=timeout_s)
    )


async def window(desktop: Desktop, title: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while title not in (listed := (await desktop.run(["wmctrl", "-lG"])).stdout):
        assert time.monotonic() < deadline, f"no window {title!r} in {listed!r}"
        await asyncio.sleep(0.05)


async def saved(desktop: Desktop, path: str, wanted: str, timeout_s: float = 20.0) -> str:
    """What the file holds once it holds `wanted`, or after a while."""
    deadline, text = time.monotonic() + timeout_s, ""
    while text != wanted and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        with contextlib.suppress(FileNotFoundError):
            text = (await desktop.get_file(path)).decode()
    return text


def at(x: int, y: int) -> Point:
    return Point(x=x, y=y, space="pixels")


def picture(capture: Capture) -> Image.Image:
    return Image.open(io.BytesIO(capture.png)).convert("RGB")


def processes_of(*uids: int) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid in uids:
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


async def gone(uid: int, timeout_s: float = 10.0) -> list[str]:
    """What is left of the user's processes after a while."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_of(uid)) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return left


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def groups(pattern: str) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"*/slime_cua/{pattern}"))


TEST_DISK = "slime_cua_test_disk"
"""Name of a mount that a test makes on purpose."""


def mounts() -> Counter[str]:
    """Mounts here, without those that container engines on this machine and tests beside these come and go with."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return Counter(
        line for line in lines if not any(name in line for name in ("docker", "/netns", TEST_DISK))
    )
