"""`tasks check`: every task is set up on a fresh desktop and judged before anybody acts. It must score exactly 0."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from sandbox_cluster.api import Requirements
from sandbox_cluster.client import SandboxClient
from sandbox_cluster.judge.evaluators import INSTALL
from slime_cua.core.errors import InfrastructureError, SlimeCuaError
from slime_cua.core.types import Task

NUM_TRIES = 2
"""A failed set-up, or a judge without a score, may be the machine's: only one that fails again, on another desktop, is the task's."""


@dataclass(frozen=True)
class Finding:
    """What the check says of one task."""

    task_id: str
    digest: str
    """Of the task as it was checked: a changed task is checked again."""
    state: Literal["good", "bad", "unchecked"]
    """unchecked: no desktop could be had, or its host lacks desktop-env's metrics, which says nothing of the task."""
    reason: str = ""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.state == "good"


def digest_of(task: Task) -> str:
    """Of everything that set-up and judge see."""
    return hashlib.sha256(task.model_dump_json().encode()).hexdigest()[:16]


def read_report(path: Path) -> dict[tuple[str, str], Finding]:
    """Findings of an earlier, perhaps broken-off check by (task id, digest); a half-written last line is left out."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            finding = Finding(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if finding.state != "unchecked":
            found[finding.task_id, finding.digest] = finding
    return found


def append_report(path: Path, finding: Finding) -> None:
    """One line more; a line that a crash cut short is ended first."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(asdict(finding)).encode() + b"\n")


async def check_tasks(
    client: SandboxClient, tasks: Sequence[Task], *, num_parallel: int = 2, key: str = "check"
) -> AsyncIterator[Finding]:
    """A finding a task, in the order of their ends. The last action is judged as DONE: a policy that did nothing and
    said it had finished. So an infeasible task scores 0, too."""
    free = asyncio.Semaphore(num_parallel)

    async def one(number: int, task: Task) -> Finding:
        async with free:
            return await _check(client, task, f"{key}-{number}")

    running = [asyncio.ensure_future(one(number, task)) for number, task in enumerate(tasks)]
    try:
        for done in asyncio.as_completed(running):
            yield await done
    finally:
        for task in running:
            task.cancel()


async def _check(client: SandboxClient, task: Task, key: str) -> Finding:
    started, digest = time.monotonic(), digest_of(task)
    state: Literal["good", "bad", "unchecked"] = "bad"
    reason = ""
    for number in range(NUM_TRIES):
        has_desktop = False
        try:
            requirements = Requirements(os=task.metadata.get("os", "ubuntu"))
            async with client.lease(
                key=f"{key}.{number}", task_id=task.id, requirements=requirements
            ) as sandbox:
                has_desktop = True
                await sandbox.setup(task)
                reply = await sandbox.evaluate(task, "DONE")
        except InfrastructureError as error:
            state = "bad" if has_desktop else "unchecked"
            reason = f"{type(error).__name__}: {error}"
            continue
        except SlimeCuaError as error:
            state, reason = "bad", f"{type(error).__name__}: {error}"
            break
        if reply.score is None:
            state = "unchecked" if INSTALL in str(reply.invalid_reason) else "bad"
            reason = f"the judge gave no score before the first action: {reply.invalid_reason}"
            if state == "bad":
                continue
        elif reply.score != 0.0:
            state, reason = "bad", f"scores {reply.score:g} before the first action; it must be exactly 0"
        else:
            state, reason = "good", ""
        break
    return Finding(task.id, digest, state, reason, round(time.monotonic() - started, 2))
