"""scripts/test.sh: its parts are the whole suite, once; one that fails fails the script; Ctrl-C reaches tests as in a terminal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """#!/bin/sh
echo "$$ $0 $*" >> calls
grep SigIgn /proc/self/status >> ignored
case "$0 $*" in *"${FAILS:-nothing}"*) echo "this part is broken"; exit 3;; esac
case "$0 $*" in *"${HANGS:-nothing}"*) exec sleep 100;; esac
"""
PARTS = {
    "lint",
    "types",
    "numerics",
    "unit and contract",
    "killed runs",
    "interrupts",
    "main jobs",
    "desktops",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The script, and instead of what it calls a program that notes the call."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/test.sh", tmp_path / "scripts")
    for name in ("scripts/env.sh", ".venv/bin/python", ".venv/bin/ruff", ".venv/bin/mypy"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name.endswith("env.sh") else PROGRAM)
        path.chmod(0o755)
    return tmp_path


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    """As from a terminal: with Ctrl-C in force, also where these tests themselves run in the background."""
    return subprocess.Popen(
        ["bash", "scripts/test.sh"],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def calls(folder: Path) -> list[list[str]]:
    """Process id, program and arguments of each call."""
    path = folder / "calls"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def seconds_of(output: str) -> dict[str, str]:
    """How each part ended, from the table at the end."""
    rows = output.split("== seconds of each part\n")[1].splitlines()
    return {name: fault for row in rows for name, _, fault in [row.split(" s  ")[1].partition(": ")]}


def test_every_test_file_is_in_one_part_and_every_part_has_its_seconds(folder: Path) -> None:
    process = start(folder)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert seconds_of(output) == dict.fromkeys({*PARTS, "in all"}, "")
    runs = [words for words in calls(folder) if "pytest" in words]
    left_out = [{w.removeprefix("--ignore=") for w in words if w.startswith("--ignore=")} for words in runs]
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        parents = {name, *(str(parent) for parent in Path(name).parents)}
        found = [n for n, words in enumerate(runs) if parents & set(words) and name not in left_out[n]]
        assert len(found) == (0 if name.startswith("tests/gpu/") else 1), (name, found)
    assert all(
        int(line.split()[1], 16) & 1 << signal.SIGINT - 1 == 0
        for line in (folder / "ignored").read_text().splitlines()
    )


@pytest.mark.parametrize(
    ("broken", "part"), [("tests/unit", "unit and contract"), ("mypy", "types"), ("kill_any", "killed runs")]
)
def test_a_part_that_fails_fails_the_script_and_the_others_still_run(
    folder: Path, broken: str, part: str
) -> None:
    process = start(folder, FAILS=broken)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "this part is broken" in output
    faults = {name: fault for name, fault in seconds_of(output).items() if fault}
    assert faults.pop(part) == "FAILED (3)" and set(faults) <= {"desktops"}, output


def test_what_lint_finds_is_all_there_is(folder: Path) -> None:
    process = start(folder, FAILS="ruff check")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 3 and "this part is broken" in output
    assert not [words for words in calls(folder) if "pytest" in words]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_ends_its_parts(folder: Path, number: signal.Signals, code: int) -> None:
    process = start(folder, HANGS="pytest")
    end = time.monotonic() + 60
    while sum("pytest" in words for words in calls(folder)) < 2:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code
    assert "unit and contract was interrupted" in output
    assert not [words for words in calls(folder) if Path(f"/proc/{words[0]}").exists()]
