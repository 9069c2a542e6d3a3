"""`tasks check`: every task is set up on a fresh desktop and judged before anybody acts. It must score exactly 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from sandbox_cluster.client import SandboxClient
from slime_cua.core.errors import SlimeCuaError
from slime_cua.core.types import Task


@dataclass(frozen=True)
class Finding:
    """What the check says of one task."""

    task_id: str
    reason: str = ""
    """Why the task is to be kept out; empty when it may be used."""

    @property
    def is_good(self) -> bool:
        return not self.reason


async def check_tasks(
    client: SandboxClient, tasks: Sequence[Task], *, num_parallel: int = 2, key: str = "check"
) -> AsyncIterator[Finding]:
    """A finding a task, in the order of their ends. The last action is judged as DONE: a policy that did nothing and
    said it had finished. So an infeasible task scores 0, too."""
    free = asyncio.Semaphore(num_parallel)

    async def one(number: int, task: Task) -> Finding:
        async with free:
            try:
                return Finding(task.id, await _reason(client, task, f"{key}-{number}"))
            except SlimeCuaError as error:
                return Finding(task.id, f"{type(error).__name__}: {error}")

    for done in asyncio.as_completed([one(number, task) for number, task in enumerate(tasks)]):
        yield await done


async def _reason(client: SandboxClient, task: Task, key: str) -> str:
    async with client.lease(key=key, task_id=task.id) as sandbox:
        await sandbox.setup(task)
        reply = await sandbox.evaluate(task, "DONE")
    if reply.score is None:
        return f"the judge gave no score before the first action: {reply.invalid_reason}"
    if reply.score != 0.0:
        return f"scores {reply.score:g} before the first action; it must be exactly 0"
    return ""
