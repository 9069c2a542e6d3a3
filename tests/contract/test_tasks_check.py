"""`tasks check` over a real gateway and fake desktops: what is kept out, what is not known, and that it goes on where it stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sandbox_cluster.tasks.check import Finding, append_report, check_tasks, digest_of, read_report
from slime_cua.core.types import Task
from tests.contract.gateway_rig import Rig

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def task(name: str, expected: str = "yes", result: Any = "no", steps: Any = ()) -> Task:
    evaluator = {
        "func": "exact_match",
        "result": {"type": "rule", "rules": result},
        "expected": {"type": "rule", "rules": {"expected": expected}},
    }
    return Task(id=name, instruction="x", evaluator=evaluator, config=tuple(steps))


async def check(rig: Rig, *tasks: Task, acquire_s: float = 60.0) -> dict[str, Finding]:
    async with rig.client(acquire_timeout_s=acquire_s) as client:
        return {finding.task_id: finding async for finding in check_tasks(client, tasks)}


async def test_only_tasks_that_score_exactly_0_are_good(tmp_path: Path) -> None:
    fails = [{"type": "execute", "parameters": {"command": "no-such-program"}}]
    infeasible = Task(id="never", instruction="x", evaluator={"func": "infeasible"}, is_infeasible=True)
    rig = Rig(tmp_path)
    async with rig.gateway(), rig.host():
        found = await check(
            rig, task("open"), task("solved", result="yes"), task("stuck", steps=fails), infeasible
        )
    assert found["open"].is_good and found["never"].is_good
    assert "scores 1 before the first action" in found["solved"].reason
    assert "set-up step 0 (execute) failed" in found["stuck"].reason and found["stuck"].state == "bad"


async def test_without_a_desktop_nothing_is_said_of_a_task(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.gateway():
        found = await check(rig, task("open"), acquire_s=0.2)
    assert found["open"].state == "unchecked" and "desktop" in found["open"].reason


def test_a_report_is_taken_up_again_after_a_crash_and_a_changed_task_is_checked_again(tmp_path: Path) -> None:
    path, first = tmp_path / "report.jsonl", task("a")
    append_report(path, Finding("a", digest_of(first), "good"))
    append_report(path, Finding("b", "1", "unchecked", "no desktop"))
    with path.open("a") as file:
        file.write('{"task_id": "c", "dig')
    append_report(path, Finding("d", "2", "bad", "scores 1"))
    known = read_report(path)
    assert set(known) == {("a", digest_of(first)), ("d", "2")}
    assert digest_of(task("a", expected="other")) != digest_of(first)
    assert json.loads(path.read_text().splitlines()[-1])["reason"] == "scores 1"
