"""A root folder for small Linux guests, made of files of this machine: Python, a shell, and the stand-in control server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

SIZE = (640, 384)
PYTHON = Path("/usr/bin/python3")
PROGRAMS = (
    "bash",
    "sh",
    "cat",
    "echo",
    "sleep",
    "date",
    "env",
    "ls",
    "mkdir",
    "mktemp",
    "rm",
    "test",
    "timeout",
    "true",
    "uname",
)
GUEST = Path(__file__).with_name("osworld_guest.py")
_LEFT_OUT = {
    "test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "lib2to3",
    "distutils",
    "dist-packages",
    "site-packages",
    "pydoc_data",
    "sqlite3",
    "unittest",
    "asyncio",
}


def build(root: Path, programs: Iterable[str] = PROGRAMS) -> Path:
    """`root`, filled. About 40 MB."""
    for name in ("tmp", "proc", "dev", "sys", "run", "etc", "home/user", "root", "usr/bin", "usr/lib", "srv"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to("usr/bin" if name == "sbin" else f"usr/{name}")
    python = PYTHON.resolve()
    copied: set[Path] = set()
    for path in (python, *(Path(shutil.which(name) or f"/usr/bin/{name}") for name in programs)):
        _copy(path.resolve(), root / "usr/bin" / path.name, copied, root)
    for name in ("python3", "python"):
        (root / "usr/bin" / name).symlink_to(python.name)
    library = Path(f"/usr/lib/{python.name}")
    shutil.copytree(
        library,
        root / f"usr/lib/{python.name}",
        ignore=lambda _, names: _LEFT_OUT & set(names) | _configs(names),
    )
    for module in library.glob("lib-dynload/*.so"):
        _needed(module, copied, root)
    (root / "etc/passwd").write_text("root:x:0:0:root:/home/user:/bin/sh\n")
    shutil.copy(GUEST, root / "srv/osworld_guest.py")
    return root


def _configs(names: list[str]) -> set[str]:
    return {name for name in names if name.startswith("config-")}


def _copy(source: Path, target: Path, copied: set[Path], root: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    _needed(source, copied, root)


def _needed(binary: Path, copied: set[Path], root: Path) -> None:
    """The shared libraries of `binary`, under the paths by which it asks for them."""
    said = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
    for word in said.split():
        path = Path(word)
        if path.is_absolute() and path not in copied and path.is_file():
            copied.add(path)
            place = word.removeprefix("/usr")
            target = root / ("usr" + place)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path.resolve(), target)
