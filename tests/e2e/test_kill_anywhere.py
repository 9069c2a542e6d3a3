"""Runs that are killed at 100 seeded moments end as runs that were never interrupted: weights, optimiser and sampler bit for bit,
each group trained once, no finished episode played again. Groups that get too old are waited for, masked or dropped.

The real loop, rollout worker, scheduler, run state, stores and Megatron checkpoints (fp32, CPU); recorded episodes stand for
desktops and engines. SLIME_CUA_KILL_MOMENTS asks for more moments, SLIME_CUA_KILL_SEED for others.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def kill_run(*arguments: str) -> dict[str, Any]:
    """The last line of tests.e2e.kill_run."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.kill_run", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=7000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_and_the_run_ends_as_if_it_were_whole(
    tmp_path,
):
    console = kill_run(str(tmp_path), "--damaged")["console"]
    assert "step 8 is passed over: " in console and "was changed or damaged since it was written" in console
    assert "training steps 7 to 8 again, from their episodes" in console


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_at_a_hundred_moments_a_run_ends_as_if_nothing_had_happened(tmp_path):
    wanted = int(os.environ.get("SLIME_CUA_KILL_MOMENTS", "100"))
    seed = os.environ.get("SLIME_CUA_KILL_SEED", "0")
    report = kill_run(str(tmp_path), "--moments", str(wanted), "--seed", seed)
    assert sum(report["moments"].values()) >= wanted, report
    assert all(report["moments"].get(kind, 0) > 0 for kind in ("operation", "signal", "parts")), report
    assert all(report["too_old"].get(kind, 0) > 0 for kind in ("masked", "stale")), report
