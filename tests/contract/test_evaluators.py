"""desktop-env's metrics through the jail, against desktop-env called directly in its own environment.

slime-cua sandbox install-evaluators --dir DIR;  SLIME_CUA_EVALUATORS_PYTHON=DIR/bin/python pytest tests/contract/test_evaluators.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sandbox_cluster.judge.evaluators import INSTALL, find_evaluators
from sandbox_cluster.judge.jail import Jail, JailConfig
from sandbox_cluster.judge.spec import METRICS, UPSTREAM
from slime_cua.core.errors import JudgeError, PreflightError

PYTHON = os.environ.get("SLIME_CUA_EVALUATORS_PYTHON", "")
needs_jail = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
needs_evaluators = pytest.mark.skipif(not PYTHON, reason="SLIME_CUA_EVALUATORS_PYTHON is not set")
TIMEOUT_S = 300.0


def truths(folder: Path) -> list[dict[str, Any]]:
    """What desktop-env says of files that its own libraries made."""
    program = Path(__file__).with_name("evaluator_truth.py")
    done = subprocess.run([PYTHON, program, folder], capture_output=True, text=True, check=False)
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert found, done.stderr[-2000:]
    return found


def job_of(case: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    files = {
        part["path"]: (folder / part["path"]).read_bytes() for part in case["arguments"] if "path" in part
    }
    arguments = [
        {"file": f"/job/in/{part['path']}"} if "path" in part else part for part in case["arguments"]
    ]
    is_ours = case["func"] in METRICS
    job = {
        "kind": "metric" if is_ours else "upstream",
        "func": case["func"],
        "module": "" if is_ours else UPSTREAM[case["func"]][0],
        "arguments": arguments,
        "options": case["options"],
    }
    return job, files


@needs_jail
@needs_evaluators
async def test_metrics_in_the_jail_score_what_desktop_env_scores(tmp_path: Path) -> None:
    jail = Jail(JailConfig(evaluators=find_evaluators()))
    passed: dict[str, set[float]] = {}
    for case in truths(tmp_path):
        verdict = await jail.run(*job_of(case, tmp_path), TIMEOUT_S)
        if isinstance(case["score"], str):
            assert verdict.score is None and case["score"] in str(verdict.reason), (case, verdict)
            continue
        assert verdict.score == pytest.approx(case["score"]), (case, verdict)
        passed.setdefault(case["func"], set()).add(case["score"])
    both = [func for func, scores in passed.items() if 1.0 in scores and len(scores) > 1]
    assert len([func for func in both if func in UPSTREAM and func not in METRICS]) >= 10, passed
    assert set(METRICS) - {"file_exists", "compare_json"} <= set(both), passed


@needs_jail
@needs_evaluators
async def test_a_metric_of_theirs_is_jailed_like_any_judge(tmp_path: Path) -> None:
    script = b"import os, socket\ntry:\n    socket.create_connection(('127.0.0.1', 1))\nexcept OSError:\n    pass\nos.fork()"
    jail = Jail(JailConfig(evaluators=find_evaluators()))
    job = {
        "kind": "upstream",
        "func": "check_python_file_by_test_suite",
        "module": "vscode",
        "arguments": [{"file": "/job/in/a.py"}, {"file": "/job/in/b.py"}],
        "options": {"test_function_name": "test"},
    }
    verdict = await jail.run(job, {"a.py": script, "b.py": b"import a\ndef test(): return True"}, TIMEOUT_S)
    assert verdict.score in (None, 0.0), verdict


@needs_jail
async def test_without_them_the_error_names_the_command() -> None:
    job = {"kind": "upstream", "func": "compare_table", "module": "table", "arguments": []}
    with pytest.raises(JudgeError, match=f"compare_table.*run `{INSTALL}`"):
        await Jail(JailConfig()).run(job, {}, 10.0)


def test_an_environment_that_is_not_whole_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_CUA_EVALUATORS_PYTHON", str(tmp_path / "bin/python"))
    with pytest.raises(PreflightError, match="is no environment with desktop-env"):
        find_evaluators()
