"""The training benchmark's table, small, on a CPU: a variant that fails is a row, and those after it are measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.path.insert(0, "scripts")
import bench_train, bench_train_switches

def broken(bench):
    raise RuntimeError("no such kernel")

bench_train_switches.SWITCHES["rows"] = broken
sys.exit(bench_train.main())
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_variant_that_fails_is_a_row_and_those_after_it_are_measured(tmp_path: Path) -> None:
    few = ["--warmup", "0", "--steps", "1", "--microbatches", "1", "--phase-s", "600"]
    names = ["--variants", "all rows,all", "--out", str(tmp_path / "rows.jsonl"), "--scratch", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, "--tiny", *few, *names],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: no such kernel" in done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("| all ", "| all rows "))]
    assert [row.split(" | ")[0] for row in rows] == ["| all rows", "| all"]
    assert "failed: RuntimeError" in rows[0]
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert found[0]["failure"] == "no such kernel"
    assert found[1]["variant"] == "all" and found[1]["tokens"] > 0
    for phase in (
        "forward of layer 3",
        "backward of layer 3",
        "backward of layer 0",
        "stepped",
        "all: step 1",
    ):
        assert phase in done.stderr, phase


def test_the_one_command_goes_on_after_a_part_that_fails_and_says_so(tmp_path: Path) -> None:
    small = ["--tiny", "--curve", "2", "--microbatches", "1", "--phase-s", "600", "--scratch", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    done = subprocess.run(
        ["bash", "scripts/bench_train.sh", str(tmp_path / "found"), "compare", "curve_tp1", "--", *small],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 1, done.stdout
    assert "curve_tp1.json cannot be read" in done.stdout
    assert "**failed** with exit code 1: --compare" in done.stdout
    assert len(json.loads((tmp_path / "found" / "curve_tp1.json").read_text())["losses"]) == 2
    assert "in 2 steps, TP=1" in (tmp_path / "found" / "log.txt").read_text()


@pytest.mark.parametrize(("line", "words"), [([], "give a folder"), (["DIR", "tp3"], "no part tp3")])
def test_the_one_command_says_what_it_does_not_know(tmp_path: Path, line: list[str], words: str) -> None:
    given = [str(tmp_path) if word == "DIR" else word for word in line]
    done = subprocess.run(
        ["bash", "scripts/bench_train.sh", *given], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and words in done.stderr
