"""`tasks check` when a desktop fails while its task is judged: that is no fault of the task."""

from __future__ import annotations

from pathlib import Path

from sandbox_cluster.tasks.check import check_tasks
from slime_cua.core.types import Task
from tests.contract.gateway_rig import Rig


async def test_a_desktop_that_fails_under_the_judge_does_not_make_its_task_bad(tmp_path: Path) -> None:
    task = Task(id="open", instruction="x", evaluator={"func": "infeasible"}, is_infeasible=True)
    rig = Rig(tmp_path)
    async with rig.gateway(), rig.host(spares=0) as machine, rig.client() as client:
        machine.provider.faults.num_broken_screenshots = 2
        [finding] = [one async for one in check_tasks(client, [task])]
        assert machine.provider.faults.num_broken_screenshots == 0
        assert finding.is_good, finding.reason
        machine.provider.faults.num_broken_screenshots = 1000
        [finding] = [one async for one in check_tasks(client, [task], key="again")]
        assert finding.state == "bad" and "gave no score" in finding.reason
