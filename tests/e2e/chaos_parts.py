"""What the chaos test is made of: a proxy that breaks replies, and an episode that knows what must be true."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field

from sandbox_cluster.client import Sandbox, SandboxClient
from slime_cua.core.actions import CodeAction, GuiAction
from slime_cua.core.coordinates import Point
from slime_cua.core.errors import SandboxError, SlimeCuaError, UnknownOutcomeError
from slime_cua.core.types import Task

LOG = "/home/user/log"
PNG_MARK = b'"png_base64":"'
JUDGE = """def call_rule_judge_1(result, expected):
    import time
    time.sleep(0.2)
    return float(open(result).read().split() == {wanted!r})
"""


class BreakingProxy:
    """Passes TCP bytes on. An armed fault meets the next reply of any connection: drop, slow, cut, corrupt (a screenshot).
    While `is_down`, nothing passes."""

    def __init__(self) -> None:
        self.target = 0
        self.armed: list[str] = []
        self.is_down = False
        self.met: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> BreakingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            there, to_there = await asyncio.open_connection("127.0.0.1", self.target)
            ends.append(to_there)
            pumps = {
                asyncio.ensure_future(self._pump(reader, to_there, is_reply=False)),
                asyncio.ensure_future(self._pump(there, writer, is_reply=True)),
            }
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        for end in ends:
            end.close()
        self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_reply: bool) -> None:
        while data := await reader.read(1 << 16):
            while self.is_down:  # noqa: ASYNC110 -- a dead link tells nobody
                await asyncio.sleep(0.05)
            if is_reply and self.armed:
                fault = self.armed.pop(0)
                self.met[fault] += 1
                if fault == "drop":
                    return
                if fault == "slow":
                    await asyncio.sleep(1.0)
                if fault == "cut":
                    writer.write(data[: len(data) // 2])
                    return
                at = data.find(PNG_MARK)
                if fault == "corrupt" and at >= 0:
                    at += len(PNG_MARK) + 60
                    data = data[:at] + (b"A" if data[at : at + 1] != b"A" else b"B") + data[at + 1 :]
            writer.write(data)
            await writer.drain()


@dataclass
class Ledger:
    """What episodes saw. `wrong` must stay empty."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def episode(client: SandboxClient, name: str, ledger: Ledger, num_actions: int = 4) -> None:
    """Lease, act, count, judge. Infrastructure may fail at any time; a claim that breaks goes to ledger.wrong."""
    try:
        async with client.lease(key=name, task_id="chaos", episode_id=name) as sandbox:
            await _play(sandbox, name, ledger, num_actions)
    except UnknownOutcomeError:
        ledger.outcomes["unknown outcome"] += 1
    except SlimeCuaError:
        ledger.outcomes["infrastructure"] += 1


async def _play(sandbox: Sandbox, name: str, ledger: Ledger, num_actions: int) -> None:
    seen = await sandbox.execute(CodeAction(language="bash", code="cat /home/user/owner"), f"{name}-own")
    if seen.returncode == 0:
        ledger.wrong.append(f"{name} got a desktop of {seen.stdout!r}")
    await sandbox.setup(_task(name, []))
    done: list[str] = []
    for number in range(num_actions):
        action_id = f"{name}-{number}"
        try:
            await _act(sandbox, action_id, is_gui=number % 2 == 1)
            done += [] if number % 2 == 1 else [action_id]
        except SandboxError:
            await _at_most_once(sandbox, action_id, ledger)
            raise
        if number == 2:
            await _act(sandbox, f"{name}-0", is_gui=False)
    wrote = (await sandbox.read_file(LOG)).decode().split()
    if wrote != done:
        ledger.wrong.append(f"{name}: ran {wrote}, was told {done}")
    reply = await sandbox.evaluate(_task(name, done), "DONE")
    if reply.score not in (1.0, None) or (reply.score is None and not reply.invalid_reason):
        ledger.wrong.append(f"{name}: score {reply.score} ({reply.invalid_reason})")
    ledger.outcomes["valid" if reply.score is not None else "judge failed"] += 1


async def _act(sandbox: Sandbox, action_id: str, is_gui: bool) -> None:
    if is_gui:
        await sandbox.step([GuiAction(kind="mouse_move", point=Point(x=500, y=500))], action_id)
    else:
        await sandbox.execute(CodeAction(language="bash", code=f"echo {action_id} >> {LOG}"), action_id)


async def _at_most_once(sandbox: Sandbox, action_id: str, ledger: Ledger) -> None:
    """After a lost reply: the action is in the log once or not at all, also after the same id is sent again by hand."""
    with contextlib.suppress(SandboxError):
        await _act(sandbox, action_id, is_gui=action_id.endswith(("1", "3")))
    with contextlib.suppress(SandboxError):
        wrote = (await sandbox.read_file(LOG)).decode().split()
        if max(Counter(wrote).values(), default=0) > 1:
            ledger.wrong.append(f"{action_id}: ran twice: {wrote}")


def _task(name: str, wanted: list[str]) -> Task:
    owner = {"type": "upload_file", "parameters": {"files": [{"path": "/home/user/owner", "content": name}]}}
    judge = {
        "result_getter": {"type": "vm_file", "path": LOG},
        "expected_getter": None,
        "code": JUDGE.format(wanted=wanted),
    }
    return Task(id="chaos", instruction="-", config=(owner,), evaluator={"judges": [judge]})
