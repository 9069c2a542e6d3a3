"""The whole way with real desktops: windows by set-up steps, starter tasks judged before and after their solution."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from pydantic import TypeAdapter

from sandbox_cluster.client import Sandbox, SandboxClient
from sandbox_cluster.cluster import LocalCluster
from sandbox_cluster.tasks.check import check_tasks
from sandbox_cluster.tasks.loader import load_tasks
from slime_cua.config.sandbox import SandboxConfig
from slime_cua.core.actions import Action, CodeAction, GuiAction, TerminateAction
from slime_cua.core.errors import SandboxError
from slime_cua.core.types import Task

pytestmark = pytest.mark.desktop
CONFIG = SandboxConfig(
    provider="local", num_desktops=2, num_spares=1, screen_wh_px=(640, 384), maximise=True, boot_timeout_s=120
)
STARTER = Path(__file__).parents[2] / "tasks" / "starter" / "heldout"
FAMILIES = ("press", "entry", "editor", "files")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(CONFIG, tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[SandboxClient]:
    async with SandboxClient(cluster.url, cluster.token, CONFIG) as made:
        yield made


def step(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"type": kind, "parameters": parameters}


async def windows(sandbox: Sandbox) -> str:
    return (await sandbox.execute(CodeAction(language="bash", code="wmctrl -l"))).stdout


async def eventually(sandbox: Sandbox, title: str, is_there: bool = True) -> bool:
    """A window with `title` comes, or is gone, in time."""
    for _ in range(100):
        if (title in await windows(sandbox)) == is_there:
            return True
        await asyncio.sleep(0.1)
    return False


async def test_windows_open_come_to_the_front_and_close_by_set_up_steps(client: SandboxClient) -> None:
    async with client.lease(key="windows") as sandbox:
        steps = (
            step("upload_file", files=[{"path": "/home/user/note.txt", "content": "hello"}]),
            step("launch", command=["xterm", "-T", "first"]),
            step("launch", command="mousepad /home/user/note.txt"),
        )
        await sandbox.setup(Task(id="t", instruction="-", config=steps))
        assert await eventually(sandbox, "first") and await eventually(sandbox, "note.txt")
        before = await sandbox.screenshot()
        await sandbox.setup(
            Task(id="t", instruction="-", config=(step("activate_window", window_name="first"),))
        )
        after = await sandbox.step([])
        assert after.png != before.png
        await sandbox.setup(
            Task(id="t", instruction="-", config=(step("close_window", window_name="first"),))
        )
        assert await eventually(sandbox, "first", is_there=False)


async def play(sandbox: Sandbox, actions: list[Action]) -> str | None:
    """The last action's word: DONE, FAIL or None."""
    for action in actions:
        if isinstance(action, GuiAction):
            await sandbox.step([action])
        elif isinstance(action, CodeAction):
            await sandbox.execute(action)
        elif isinstance(action, TerminateAction):
            return "DONE" if action.status == "success" else "FAIL"
    return None


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_starter_task_scores_0_before_and_1_after_its_solution(
    client: SandboxClient, family: str
) -> None:
    task = load_tasks([STARTER / f"{family}.jsonl"])[0]
    routes: dict[str, Any] = task.metadata["routes"]
    actions = TypeAdapter(list[Action]).validate_python(next(iter(routes.values())))
    async with client.lease(key=f"solve-{family}", task_id=task.id) as sandbox:
        await sandbox.setup(task)
        assert (await sandbox.evaluate(task, "DONE")).score == 0.0
        last = await play(sandbox, actions)
        assert (await sandbox.evaluate(task, last)).score == 1.0


async def test_the_check_of_initial_states_names_the_bad_task(client: SandboxClient) -> None:
    good = load_tasks([STARTER / "files.jsonl"])[0]
    leaky = "def call_rule_judge_1(result, expected):\n    return 0.5"
    raising = "def call_rule_judge_1(result, expected):\n    return open(result).read()"
    judge = {"result_getter": {"type": "vm_file", "path": "/home/user/x"}, "expected_getter": None}
    bad = [
        Task(id=name, instruction="-", evaluator={"judges": [{**judge, "code": code}]})
        for name, code in (("leaky", leaky), ("raising", raising))
    ]
    found = {one.task_id: one.reason async for one in check_tasks(client, [good, *bad])}
    assert found[good.id] == ""
    assert "scores 0.5 before the first action" in found["leaky"] and "gave no score" in found["raising"]


async def test_one_desktop_sees_nothing_of_another(client: SandboxClient) -> None:
    async with client.lease(key="one") as one, client.lease(key="two") as two:
        await one.execute(CodeAction(language="bash", code="echo mine > ~/secret; echo mine > /tmp/secret"))
        for path in ("/home/user/secret", "/tmp/secret"):
            with pytest.raises(SandboxError, match="not_found"):
                await two.read_file(path)


def is_zombie(process: psutil.Process) -> bool:
    """One that was collected since it was listed is none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return False


async def test_the_host_collects_the_orphans_of_ended_sandboxes(
    cluster: LocalCluster, client: SandboxClient
) -> None:
    assert cluster.host is not None
    for number in range(4):
        async with client.lease(key=f"orphan-{number}") as sandbox:
            await sandbox.step([])
    host = psutil.Process(cluster.host.process.pid)
    for _ in range(100):
        zombies = [one.pid for one in host.children() if is_zombie(one)]
        if not zombies:
            break
        await asyncio.sleep(0.1)
    assert zombies == []


WEBSOCKET = """
import base64, hashlib, json, socket, struct
server = socket.create_server(("127.0.0.1", 9222))
while True:
    peer, _ = server.accept()
    head = b""
    while b"\\r\\n\\r\\n" not in head:
        head += peer.recv(4096)
    lines = dict(line.lower().split(": ", 1) for line in head.decode().split("\\r\\n") if ": " in line)
    raw = {line.split(": ", 1)[0].lower(): line.split(": ", 1)[1] for line in head.decode().split("\\r\\n") if ": " in line}
    if "sec-websocket-key" not in lines:
        body = json.dumps({"webSocketDebuggerUrl": "ws://%s/devtools/browser/x" % lines["host"]}).encode()
        peer.sendall(b"HTTP/1.1 200 OK\\r\\nconnection: close\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
        peer.close()
        continue
    key = raw["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    accept = base64.b64encode(hashlib.sha1(key.encode()).digest())
    peer.sendall(b"HTTP/1.1 101 x\\r\\nupgrade: websocket\\r\\nconnection: upgrade\\r\\nsec-websocket-accept: " + accept + b"\\r\\n\\r\\n")
    first, second = peer.recv(2)
    mask, data = peer.recv(4), peer.recv(second & 127)
    text = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data)).upper()
    peer.sendall(struct.pack("BB", 0x81, len(text)) + text)
"""


async def test_a_debugger_inside_a_local_desktop_is_reached_through_the_gateway(
    cluster: LocalCluster, client: SandboxClient
) -> None:
    async with client.lease(key="cdp") as sandbox, aiohttp.ClientSession() as session:
        base = f"{cluster.url}/g/{sandbox.lease.secret}/cdp"
        async with session.get(f"{base}/json/version") as reply:
            assert reply.status == 503 and "port 9222" in (await reply.json())["error"]["message"]
        await sandbox.setup(
            Task(
                id="cdp",
                instruction="-",
                config=(
                    step("upload_file", files=[{"path": "/home/user/ws.py", "content": WEBSOCKET}]),
                    step("launch", command=["python3", "/home/user/ws.py"]),
                ),
                evaluator={},
            )
        )
        for _ in range(200):
            async with session.get(f"{base}/json/version") as reply:
                if reply.status == 200:
                    address = (await reply.json())["webSocketDebuggerUrl"]
                    break
            await asyncio.sleep(0.1)
        assert address == base.replace("http", "ws", 1) + "/devtools/browser/x"
        async with session.ws_connect(address) as socket:
            await socket.send_str("hello")
            assert await socket.receive_str() == "HELLO"
