"""desktop-env's metrics (OSWorld's evaluators) in an environment of their own, which judges of theirs run in.

Its pins (torch 2.5, transformers 4.35, numpy below 2) fit no environment of ours, and most of them serve its agents, not
its metrics. So only what the metrics import is installed, pinned by evaluators.lock; torch and easyocr are not among it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from slime_cua.core.errors import PreflightError

VERSION = "1.0.2"
"""Of desktop-env."""
INSTALL = "slime-cua sandbox install-evaluators"
VARIABLE = "SLIME_CUA_EVALUATORS_PYTHON"
LOCK = Path(__file__).with_name("evaluators.lock")
_MARK = "slime_cua_evaluators.json"
_PROBE = "import json, sys, desktop_env, numpy, openpyxl, docx, pptx; print(json.dumps([sys.base_prefix, sys.version]))"


@dataclass(frozen=True)
class Evaluators:
    """An installed environment."""

    folder: str
    memory_bytes: int = 4 << 30
    """Address space of a judge that uses it: its libraries reserve far more than they touch."""


def default_folder() -> Path:
    """Where they are installed unless told otherwise. Root's judges run as other users, who must be able to read it."""
    if os.geteuid() == 0:
        return Path("/var/lib/slime-cua/evaluators")
    return Path.home() / ".local/share/slime-cua/evaluators"


def find_evaluators() -> Evaluators | None:
    """The environment of $SLIME_CUA_EVALUATORS_PYTHON, else of the default folder, else None.

    PreflightError when the variable names one that is not whole.
    """
    named = os.environ.get(VARIABLE)
    folder = Path(named).parent.parent if named else default_folder()
    try:
        is_ours = json.loads((folder / _MARK).read_text())["desktop_env"] == VERSION
    except (OSError, ValueError, KeyError):
        is_ours = False
    if named and not is_ours:
        raise PreflightError(
            f"{VARIABLE}={named} is no environment with desktop-env {VERSION}: run `{INSTALL} --dir {folder}`"
        )
    return Evaluators(str(folder)) if is_ours else None


def install(folder: Path, python: str = "/usr/bin/python3") -> Evaluators:
    """Make the environment in `folder` with the system's Python, which the jail shows. Raises PreflightError."""
    _run([python, "-m", "venv", "--without-pip", "--clear", str(folder)])
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install"]
    pip += ["--no-deps", "--disable-pip-version-check", "--quiet"]
    _run([*pip, "--requirement", str(LOCK)])
    prefix, version = json.loads(_run([str(folder / "bin/python"), "-I", "-c", _PROBE]).splitlines()[-1])
    if prefix != "/usr":
        raise PreflightError(
            f"{python} belongs to {prefix}: judges see only /usr; give --python /usr/bin/python3"
        )
    if os.geteuid() == 0:
        _check_readable(folder)
    (folder / _MARK).write_text(json.dumps({"desktop_env": VERSION, "python": version}))
    return Evaluators(str(folder))


def _check_readable(folder: Path) -> None:
    for part in (folder, *folder.resolve().parents):
        if part.stat().st_mode & 0o005 != 0o005:
            raise PreflightError(
                f"judges run as users who may not read {part}: `chmod o+rx {part}`, or another --dir"
            )


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PreflightError(f"{command[0]} cannot be run: {error}") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-1500:]
        raise PreflightError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """`slime-cua sandbox install-evaluators [--dir DIR] [--python PYTHON]`."""
    import argparse

    parser = argparse.ArgumentParser(prog=INSTALL, description=__doc__)
    parser.add_argument("--dir", type=Path, default=default_folder(), help="default: %(default)s")
    parser.add_argument("--python", default="/usr/bin/python3", help="an interpreter under /usr")
    options = parser.parse_args(arguments)
    folder = options.dir.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    install(folder, options.python)
    print(f"desktop-env {VERSION}'s metrics are in {folder}")
    if folder != default_folder():
        print(f"set {VARIABLE}={folder}/bin/python where the host agent runs")
    return 0
