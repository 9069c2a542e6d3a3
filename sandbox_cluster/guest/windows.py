"""Windows, pointer and folders of a desktop as OSWorld's endpoints ask for them, by programs inside (wmctrl, xdotool)."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import PurePosixPath
from typing import Any

from sandbox_cluster.providers.base import HOME
from sandbox_cluster.providers.desktop import Desktop

OPEN_TIMEOUT_S = 60.0
POLL_S = 0.1
_EDITOR = "mousepad"
_PROGRAMS = {
    **dict.fromkeys((".xls", ".xlsx", ".csv", ".ods", ".gnumeric", ".tsv"), ("localc", "gnumeric")),
    **dict.fromkeys((".doc", ".docx", ".odt", ".rtf"), ("lowriter", "abiword")),
    **dict.fromkeys((".ppt", ".pptx", ".odp"), ("loimpress",)),
    **dict.fromkeys((".htm", ".html"), ("chromium", "firefox")),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".gif", ".bmp"), ("feh", "gimp")),
    ".pdf": ("evince",),
}
_TREE = """
import json, os, sys
def tree(path, depth):
    name = os.path.basename(path.rstrip("/")) or path
    if not os.path.isdir(path) or os.path.islink(path):
        return {"type": "file", "name": name}
    children = [tree(os.path.join(path, child), depth - 1) for child in sorted(os.listdir(path))] if depth else []
    return {"type": "directory", "name": name, "children": children}
print(json.dumps(tree(sys.argv[1], 20) if os.path.isdir(sys.argv[1]) else None))
"""


async def pointer(desktop: Desktop) -> tuple[int, int]:
    """The pointer's place in pixels."""
    text = (await desktop.run(["xdotool", "getmouselocation"])).stdout
    found = re.match(r"x:(\d+) y:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


async def titles(desktop: Desktop) -> list[str]:
    """Titles of all windows."""
    lines = (await desktop.run(["wmctrl", "-l"])).stdout.splitlines()
    return [parts[3] for line in lines if len(parts := line.split(None, 3)) == 4]


async def command(desktop: Desktop, flag: str, name: str, is_strict: bool, is_by_class: bool) -> bool:
    """`wmctrl` on a window by title or class; whether there was one."""
    flags = (["-x"] if is_by_class else []) + (["-F"] if is_strict else [])
    return (await desktop.run(["wmctrl", *flags, flag, name])).returncode == 0


async def size_of_class(desktop: Desktop, class_name: str) -> tuple[int, int] | None:
    """Width and height in pixels of the first window whose WM_CLASS has that name."""
    for line in (await desktop.run(["wmctrl", "-lGx"])).stdout.splitlines():
        parts = line.split(None, 8)
        if len(parts) >= 7 and class_name in (parts[6], *parts[6].rsplit(".", 1)):
            return int(parts[4]), int(parts[5])
    return None


async def verify(
    desktop: Desktop, wanted: dict[str, Any], wait_s: float, interval_s: float
) -> tuple[bool, float]:
    """Whether window_exists and command_success came true in time, and the seconds waited."""
    started = time.monotonic()
    while True:
        is_true = True
        if wanted.get("window_exists"):
            is_true = any(str(wanted["window_exists"]) in title for title in await titles(desktop))
        if is_true and wanted.get("command_success"):
            is_true = (
                await desktop.run(str(wanted["command_success"]), is_shell=True, timeout_s=5)
            ).returncode == 0
        waited_s = time.monotonic() - started
        if is_true or waited_s >= wait_s:
            return is_true, waited_s
        await asyncio.sleep(interval_s)


async def folder_tree(desktop: Desktop, path: str) -> dict[str, Any] | None:
    """The folder as {type, name, children}; None when it is none."""
    path = HOME + path[1:] if path.startswith("~") else path
    reply = await desktop.run(["/usr/bin/python3", "-I", "-c", _TREE, path], max_output_bytes=16 << 20)
    tree = json.loads(reply.stdout) if reply.returncode == 0 and not reply.is_truncated else None
    return tree if isinstance(tree, dict) else None


async def open_path(desktop: Desktop, path: str) -> str | None:
    """Open a file with the program for its kind (or start the program of that name) and wait for its window; a fault or None."""
    if "/" not in path and not path.startswith("~") and "." not in path:
        candidates: tuple[str, ...] = (path,)
        wanted, argument = path, []
    else:
        target = HOME + path[1:] if path.startswith("~") else path
        if (await desktop.run(["test", "-e", target])).returncode != 0:
            return f"File not found: {path}"
        is_folder = (await desktop.run(["test", "-d", target])).returncode == 0
        name = PurePosixPath(target)
        candidates = ("pcmanfm",) if is_folder else _PROGRAMS.get(name.suffix.lower(), (_EDITOR,))
        wanted, argument = (name.name or "/") if is_folder else name.stem, [target]
    known = set(await titles(desktop))
    if not await _start(desktop, candidates, argument):
        return f"no program here opens {path}: tried {', '.join(candidates)}"
    deadline = time.monotonic() + OPEN_TIMEOUT_S
    while time.monotonic() < deadline:
        for title in await titles(desktop):
            if wanted.lower() in title.lower() or title not in known:
                await command(desktop, "-a", title, is_strict=True, is_by_class=False)
                return None
        await asyncio.sleep(POLL_S)
    return f"no window for {path} came up in {OPEN_TIMEOUT_S:g} s"


async def _start(desktop: Desktop, candidates: tuple[str, ...], arguments: list[str]) -> bool:
    for program in candidates:
        try:
            await desktop.launch([program, *arguments])
        except OSError:
            continue
        return True
    return False
