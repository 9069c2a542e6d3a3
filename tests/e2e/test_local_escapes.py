"""What a program inside a local desktop tries and does not get: out, to its host, or rid of its desktop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_cluster.api import EvaluateRequest, Settle
from sandbox_cluster.guest.events import Button, Move
from sandbox_cluster.guest.server import create_app
from sandbox_cluster.guest.x11 import ANSWER_S
from sandbox_cluster.judge.evaluate import evaluate
from sandbox_cluster.judge.jail import Jail
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.local import LocalProvider
from sandbox_cluster.tasks.setup import Setup
from slime_cua.core.actions import GuiAction
from slime_cua.core.errors import SandboxError
from tests.e2e.local_rig import FIRST_UID, at, code, do, needs_root

pytestmark = pytest.mark.desktop
ESCAPES = {
    "host files": "cat /etc/shadow /root/.bashrc /work/* 2>/dev/null; ls /root /home/user/.. 2>/dev/null | grep -v user",
    "other processes": "ls /proc | grep -E '^[0-9]+$' | wc -l | awk '$1 > 12'",
    "network": "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 2); print(1)'",
    "host loopback": "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", PORT), 2); print(1)'",
    "new namespace": "unshare -U true && echo 1; unshare -n true && echo 1",
    "mount": "mount -t tmpfs none /tmp && echo 1",
    "write to the system": "touch /usr/bin/x /etc/x /x /agent.py 2>/dev/null && echo 1",
    "trace": "python3 -c 'import ctypes; print(1) if ctypes.CDLL(None).ptrace(16, 2, 0, 0) == 0 else 0'",
    "agent memory": "head -c 1 /proc/1/mem; cat /proc/1/environ; ls /proc/1/fd",
    "kernel log": "dmesg && echo 1",
    "set user id": "find / -xdev -perm -4000 -exec {} --version ';' -quit >/dev/null 2>&1; su -c 'echo 1' </dev/null",
    "devices": "ls /dev | grep -E 'sd|nvme|kvm|mem'",
    "cgroups": "ls /sys/fs/cgroup && echo 1",
}


@pytest.mark.parametrize("kind", sorted(ESCAPES))
async def test_an_escape_attempt_gets_nothing(desktop: Desktop, kind: str) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = str(server.sockets[0].getsockname()[1])
    reply = await code(desktop, ESCAPES[kind].replace("PORT", port))
    server.close()
    await server.wait_closed()
    assert reply.stdout == "", reply
    assert desktop.is_alive


async def test_a_fork_bomb_stays_inside_and_the_desktop_lives(desktop: Desktop) -> None:
    bomb = "import os, time\nfor _ in range(500):\n    if os.fork() == 0:\n        time.sleep(60)\n        os._exit(0)"
    reply = await code(desktop, bomb, "python", timeout_s=3)
    assert reply.returncode != 0 and ("BlockingIOError" in reply.stderr or "Resource" in reply.stderr)
    await desktop.screenshot()


async def test_a_full_disk_inside_is_the_programs_error_and_not_ours(desktop: Desktop) -> None:
    reply = await code(
        desktop, "for n in 1 2 3; do head -c 200000000 /dev/zero > /tmp/f$n || echo full; done; rm /tmp/f*"
    )
    assert "full" in reply.stdout
    await desktop.screenshot()


@needs_root
async def test_too_much_memory_ends_the_program_and_not_the_desktop(desktop: Desktop) -> None:
    reply = await code(desktop, "x = bytearray(900 << 20)\nprint(len(x))", "python")
    assert reply.returncode != 0 and reply.stdout == ""
    await do(desktop, GuiAction(kind="left_click", point=at(5, 5)))


def process_of(uid: int, name: str) -> int:
    """The host's pid of a desktop's program."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_theirs = folder.name.isdigit() and folder.stat().st_uid == uid
            if is_theirs and (folder / "comm").read_text().strip() == name:
                return int(folder.name)
    raise AssertionError(f"user {uid} has no {name}")


@needs_root
async def test_an_x_server_that_stands_still_is_an_error_in_bounded_time(desktop: Desktop) -> None:
    os.kill(process_of(FIRST_UID, "Xvfb"), signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(SandboxError, match="X server"):
        await desktop.play([Move(5, 5), Button(1, True)], Settle())
    assert time.monotonic() - started < 30


@needs_root
async def test_a_boot_waits_for_a_slow_x_server_as_long_as_a_boot_may_take(
    make: Callable[..., LocalProvider],
) -> None:
    booting = asyncio.create_task(make().boot(3))
    manager = None
    while manager is None and not booting.done():
        with contextlib.suppress(AssertionError):
            manager = process_of(FIRST_UID + 3, "openbox")
        await asyncio.sleep(0.005)
    server = process_of(FIRST_UID + 3, "Xvfb")
    os.kill(server, signal.SIGSTOP)
    await asyncio.sleep(ANSWER_S + 1)
    os.kill(server, signal.SIGCONT)
    assert (await booting).boot_s > ANSWER_S


@needs_root
async def test_a_desktop_whose_agent_dies_is_known_to_be_gone(desktop: Desktop) -> None:
    os.kill(process_of(FIRST_UID, "python3"), signal.SIGKILL)
    with pytest.raises(SandboxError):
        await desktop.run("sleep 5")
    assert not desktop.is_alive


HIDE = {
    "kill all": "kill -9 -1",
    "kill and stop the agent": "kill -9 1; kill -STOP 1; kill -9 2 3",
    "kill X": "pkill -9 Xvfb; pkill -STOP Xvfb; pkill -9 -f agent.py; killall5 -9 || true",
    "write into the control socket": "for f in /proc/1/fd/*; do echo x > $f; done",
    "cut the framebuffer": ": > /run/fb/Xvfb_screen0; rm -rf /run/fb /tmp/.X11-unix",
    "remove everything": "rm -rf ~ ~/.* /tmp/* /tmp/.* /run/* /dev/shm/*",
    "fill memory": """for f in /tmp/a /run/a /dev/shm/a ~/a; do head -c 400000000 /dev/zero > $f; done
        python3 -c 'x = bytearray(900 << 20)'""",
    "all processes": """python3 -c '
import os, time
for _ in range(500):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
' || true""",
}
X_CLIENT = """
    import os, socket, struct, time
    def connect():
        x = socket.socket(socket.AF_UNIX)
        x.connect("\\0/tmp/.X11-unix/X0")
        x.sendall(struct.pack("<BxHHHHxx", ord("l"), 11, 0, 0, 0))
        x.recv(65536)
        return x
"""
HIDE_BEHIND_X = {
    "grab the server": """
    if os.fork() == 0:
        os.setsid()
        x = connect()
        x.sendall(struct.pack("<BxH", 36, 1))
        time.sleep(600)
    time.sleep(0.5)
    """,
    "end all X clients": """
    x = connect()
    for client in range(1, 64):
        for resource in range(4):
            x.sendall(struct.pack("<BxHI", 113, 2, client << 21 | resource))
    time.sleep(0.5)
    """,
}


@pytest.mark.parametrize("kind", [*HIDE, *HIDE_BEHIND_X])
async def test_a_program_cannot_end_its_desktop(desktop: Desktop, kind: str) -> None:
    if kind in HIDE:
        await code(desktop, HIDE[kind])
    else:
        await code(desktop, X_CLIENT + HIDE_BEHIND_X[kind], "python")
    await do(desktop, GuiAction(kind="left_click", point=at(5, 5)))
    await desktop.screenshot()
    await desktop.run("true")
    assert await desktop.get_file("/etc/passwd")
    assert desktop.is_alive


@pytest.mark.parametrize("kind", ["kill all", "all processes", "grab the server"])
async def test_a_policy_cannot_hide_from_its_judge_by_ending_its_desktop(desktop: Desktop, kind: str) -> None:
    if kind in HIDE:
        await code(desktop, HIDE[kind])
    else:
        await code(desktop, X_CLIENT + HIDE_BEHIND_X[kind], "python")
    judges = [
        {
            "result_getter": {"type": "vm_command_line", "command": ["cat", "/home/user/state"]},
            "code": "def call_rule_judge_1(result, expected):\n    return float(result == 'right')",
        },
        {
            "result_getter": {"type": "vm_file", "path": "/home/user/state"},
            "code": "def call_rule_judge_2(result, expected):\n    return float(open(result).read() == 'right') if result else 0.0",
        },
    ]
    request = EvaluateRequest(evaluator={"judges": judges}, last_action="DONE")
    for state, right in ((b"wrong", 0.0), (b"right", 1.0)):
        await desktop.put_file("/home/user/state", state)
        reply = await evaluate(desktop, request, Jail(), Setup(create_app), 120.0)
        assert reply.score == right, reply
