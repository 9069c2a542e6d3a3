"""Starter tasks in real desktops, with the real set-up and jailed judges.

A sample of both splits by default; SLIME_CUA_STARTER=all takes every held-out instance, SLIME_CUA_STARTER=train:5 five of
each family for training. Run as root or with user namespaces allowed; needs what docs/desktops.md installs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_cluster.api import EvaluateRequest, ExecuteRequest, StepRequest
from sandbox_cluster.guest.server import create_app
from sandbox_cluster.judge.evaluate import evaluate
from sandbox_cluster.judge.jail import Jail
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.local import LocalProvider
from sandbox_cluster.tasks.loader import load_tasks
from sandbox_cluster.tasks.setup import Setup
from sandbox_cluster.tasks.steps import inline_files
from slime_cua.config.run import TeacherConfig
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.actions import Action, CodeAction, GuiAction, TerminateAction
from slime_cua.core.errors import PreflightError
from slime_cua.core.types import Task
from slime_cua.sft.teacher import ScriptedTeacher

pytestmark = pytest.mark.desktop

TASKS = Path(__file__).parents[2] / "tasks" / "starter"
CONFIG = DesktopConfig(screen_wh_px=(640, 384), maximise=True, first_uid=61000, boot_timeout_s=120)
LIMIT_S = 120.0
FAMILIES = sorted(path.stem for path in (TASKS / "train").glob("*.jsonl"))


class Room:
    """Desktops one after the other, and what judges them."""

    def __init__(self, provider: LocalProvider) -> None:
        self.provider, self.setup, self.jail = provider, Setup(create_app), Jail()

    async def attempt(self, task: Task, actions: tuple[Action, ...]) -> tuple[float | None, float | None]:
        """The scores before the first and after the last action, in a fresh desktop."""
        desktop = await self.provider.boot(0)
        try:
            await self.setup.run(desktop, [inline_files(step) for step in task.config], LIMIT_S)
            before = await self.score(desktop, task, None)
            last = None
            for number, action in enumerate(actions):
                if isinstance(action, GuiAction):
                    await desktop.step(StepRequest(action_id=f"turn-{number}", actions=(action,)))
                elif isinstance(action, CodeAction):
                    reply = await desktop.execute(ExecuteRequest(action_id=f"turn-{number}", action=action))
                    assert reply.returncode == 0, reply
                elif isinstance(action, TerminateAction):
                    last = "DONE" if action.status == "success" else "FAIL"
            return before, await self.score(desktop, task, last)
        finally:
            await desktop.kill()

    async def score(self, desktop: Desktop, task: Task, last: str | None) -> float | None:
        request = EvaluateRequest(task_id=task.id, evaluator=task.evaluator, last_action=last)
        reply = await evaluate(desktop, request, self.jail, self.setup, LIMIT_S)
        assert reply.invalid_reason is None, reply
        return reply.score


@contextlib.asynccontextmanager
async def a_room(config: DesktopConfig, folder: Path) -> AsyncIterator[Room]:
    provider = LocalProvider(config, folder, label=f"starter-{os.getpid()}")
    try:
        await provider.check()
    except PreflightError as error:
        pytest.skip(str(error))
    try:
        yield Room(provider)
    finally:
        await provider.close()


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    async with a_room(CONFIG, tmp_path) as made:
        yield made


def chosen(family: str) -> list[Task]:
    wish = os.environ.get("SLIME_CUA_STARTER", "")
    if wish == "all":
        return load_tasks([TASKS / "heldout" / f"{family}.jsonl"])
    if match := re.fullmatch(r"(train|heldout):(\d+)", wish):
        return load_tasks([TASKS / match[1] / f"{family}.jsonl"])[: int(match[2])]
    return [load_tasks([TASKS / split / f"{family}.jsonl"])[0] for split in ("train", "heldout")]


@pytest.mark.parametrize("family", FAMILIES)
async def test_in_a_desktop_nothing_scores_before_and_every_solution_after(family: str, room: Room):
    for task in chosen(family):
        for way in task.metadata["routes"]:
            teacher = ScriptedTeacher(task, config=TeacherConfig(route_weights={way: 1}))
            assert await room.attempt(task, teacher.actions) == (0.0, 1.0), f"{task.id} by {way}"


async def test_in_a_desktop_a_wrong_attempt_scores_0(room: Room):
    for family in ("press", "boxes", "dialog", "files", "editor"):
        task = load_tasks([TASKS / "train" / f"{family}.jsonl"])[1]
        wrong = task.model_copy(update={"metadata": {"routes": {"wrong": task.metadata["wrong"]}}})
        assert await room.attempt(task, ScriptedTeacher(wrong).actions) == (0.0, 0.0), task.id


async def test_boards_scale_to_a_larger_screen(tmp_path: Path):
    larger = CONFIG.model_copy(update={"screen_wh_px": (1504, 832)})
    async with a_room(larger, tmp_path) as room:
        for family in ("press", "dialog", "entry"):
            task = load_tasks([TASKS / "heldout" / f"{family}.jsonl"])[2]
            assert await room.attempt(task, ScriptedTeacher(task).actions) == (0.0, 1.0), task.id


LOOK_INTO_THE_BOARD = """
import pathlib, re
for folder in pathlib.Path('/proc').glob('[0-9]*'):
    if b'board.py' in (folder / 'cmdline').read_bytes():
        try:
            lines = (folder / 'maps').read_text().splitlines()
            with open(folder / 'mem', 'rb') as memory:
                for start, end in [map(lambda n: int(n, 16), line.split()[0].split('-')) for line in lines if ' rw' in line]:
                    memory.seek(start)
                    print(set(re.findall(rb'(?<![0-9a-f])[0-9a-f]{24}(?![0-9a-f])', memory.read(end - start))))
        except PermissionError as error:
            print(error)
"""


async def test_a_program_on_the_desktop_finds_no_spec_and_cannot_sign_a_state(room: Room):
    task = load_tasks([TASKS / "train" / "press.jsonl"])[0]
    look = "cat ~/.starter/spec.json; ls -a ~/.starter; cat /proc/*/cmdline /proc/*/environ 2>/dev/null | tr '\\0' ' '"
    desktop = await room.provider.boot(0)
    try:
        await room.setup.run(desktop, [inline_files(step) for step in task.config], LIMIT_S)
        seen = await desktop.execute(
            ExecuteRequest(action_id="look", action=CodeAction(language="bash", code=look))
        )
        secret = re.search(r"sha256\(\('(\w+)'", task.evaluator["judges"][0]["code"])
        assert secret and secret[1] not in seen.stdout + seen.stderr
        assert "No such file" in seen.stderr
        inside = await desktop.execute(
            ExecuteRequest(action_id="inside", action=CodeAction(language="python", code=LOOK_INTO_THE_BOARD))
        )
        assert secret[1] not in inside.stdout and "Permission denied" in inside.stdout, inside
        (target,) = re.findall(r"\['press', '([^']+)'\]", task.evaluator["judges"][0]["code"])
        forge = (
            "import json, pathlib; p = pathlib.Path.home() / '.starter/state.json'; s = json.loads(p.read_text()); "
            f"s['events'] = [['press', {target!r}]]; p.write_text(json.dumps(s))"
        )
        await desktop.execute(
            ExecuteRequest(action_id="forge", action=CodeAction(language="python", code=forge))
        )
        assert await room.score(desktop, task, "DONE") == 0.0
    finally:
        await desktop.kill()


ASK_TK = r"""
import socket, struct, tkinter
x = socket.socket(socket.AF_UNIX)
x.connect("\0/tmp/.X11-unix/X0")
x.sendall(struct.pack("<BxHHHHxx", ord("l"), 11, 0, 0, 0))
x.recv(65536)
x.sendall(struct.pack("<BBH", 111, 1, 1))  # access control on: Tk hears others on such a server only
own = tkinter.Tk()
own.withdraw()
try:
    print(own.tk.call("send", "board", "[lindex [winfo children .] 0] find all"))
except tkinter.TclError as error:
    print("refused:", error)
"""


async def test_a_program_on_the_desktop_cannot_ask_the_board_what_is_on_it(room: Room):
    task = load_tasks([TASKS / "train" / "press.jsonl"])[0]
    desktop = await room.provider.boot(0)
    try:
        await room.setup.run(desktop, [inline_files(step) for step in task.config], LIMIT_S)
        reply = await desktop.execute(
            ExecuteRequest(action_id="ask", action=CodeAction(language="python", code=ASK_TK))
        )
        assert reply.stdout == 'refused: no application named "board"\n', reply
    finally:
        await desktop.kill()


async def test_set_up_ends_with_the_board_on_the_screen(room: Room):
    """The first screenshot after the set-up is the one that stays."""
    task = load_tasks([TASKS / "train" / "press.jsonl"])[0]
    desktop = await room.provider.boot(0)
    try:
        empty = await desktop.screenshot()
        await room.setup.run(desktop, [inline_files(step) for step in task.config], LIMIT_S)
        first = await desktop.screenshot()
        await asyncio.sleep(0.5)
        later = await desktop.screenshot()
    finally:
        await desktop.kill()
    assert first.sha256 != empty.sha256
    assert first.sha256 == later.sha256
