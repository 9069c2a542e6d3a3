"""Real desktops in namespaces: real applications, real input, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from sandbox_cluster.api import EvaluateRequest, ExecuteReply, ExecuteRequest, Settle, StepRequest
from sandbox_cluster.guest.events import Button, Move
from sandbox_cluster.guest.server import create_app
from sandbox_cluster.judge.evaluate import evaluate
from sandbox_cluster.judge.getters import Inputs, Scene, fetch
from sandbox_cluster.judge.jail import Jail
from sandbox_cluster.providers import limits
from sandbox_cluster.providers.base import Capture
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.local import LocalProvider
from sandbox_cluster.tasks.setup import Setup
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.actions import CodeAction, GuiAction
from slime_cua.core.coordinates import Point
from slime_cua.core.errors import SandboxError

pytestmark = pytest.mark.desktop
FIRST_UID = 61500
TEXT = 'héllo <你好> €Ω 😀 "x" [a]{b}|~\\\nsecond line\tTAB'
PATIENT = Settle(quiet_ms=200, max_ms=5000)
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="a host user per slot needs root")


def config(**changes: object) -> DesktopConfig:
    return DesktopConfig(
        **{"screen_wh_px": (640, 384), "first_uid": FIRST_UID, "boot_timeout_s": 120, **changes}
    )


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., LocalProvider]]:
    made: list[LocalProvider] = []

    def build(max_boots: int = 2, **changes: object) -> LocalProvider:
        made.append(
            LocalProvider(config(**changes), tmp_path / str(len(made)), f"e2e-{len(made)}", max_boots)
        )
        return made[-1]

    yield build
    for provider in made:
        await provider.close()


@pytest.fixture
async def desktop(make: Callable[..., LocalProvider]) -> Desktop:
    return await make().boot(0)


async def do(desktop: Desktop, *actions: GuiAction, settle: Settle = PATIENT) -> Capture:
    return await desktop.step(StepRequest(action_id=uuid.uuid4().hex, actions=actions, settle=settle))


async def code(desktop: Desktop, text: str, language: str = "bash", timeout_s: float = 20.0) -> ExecuteReply:
    action = CodeAction(language=language, code=textwrap.dedent(text))  # type: ignore[arg-type]
    return await desktop.execute(
        ExecuteRequest(action_id=uuid.uuid4().hex, action=action, timeout_s=timeout_s)
    )


async def window(desktop: Desktop, title: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while title not in (listed := (await desktop.run(["wmctrl", "-lG"])).stdout):
        assert time.monotonic() < deadline, f"no window {title!r} in {listed!r}"
        await asyncio.sleep(0.05)


async def saved(desktop: Desktop, path: str, wanted: str, timeout_s: float = 20.0) -> str:
    """What the file holds once it holds `wanted`, or after a while."""
    deadline, text = time.monotonic() + timeout_s, ""
    while text != wanted and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        with contextlib.suppress(FileNotFoundError):
            text = (await desktop.get_file(path)).decode()
    return text


def at(x: int, y: int) -> Point:
    return Point(x=x, y=y, space="pixels")


def picture(capture: Capture) -> Image.Image:
    return Image.open(io.BytesIO(capture.png)).convert("RGB")


def processes_of(*uids: int) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid in uids:
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


async def gone(uid: int, timeout_s: float = 10.0) -> list[str]:
    """What is left of the user's processes after a while."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_of(uid)) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return left


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def groups(pattern: str) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"*/slime_cua/{pattern}"))


def num_mounts() -> int:
    """Mounts here, without those that container engines on this machine come and go with."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return sum("docker" not in line and "/netns" not in line for line in lines)


@pytest.mark.parametrize("size", [(640, 384), (1504, 832), (801, 603)])
async def test_text_in_any_script_typed_into_an_editor_is_in_the_saved_file(
    make: Callable[..., LocalProvider], size: tuple[int, int]
) -> None:
    desktop = await make(screen_wh_px=size).boot(0)
    await desktop.launch(["mousepad", "note.txt"])
    await window(desktop, "Mousepad")
    await do(desktop, GuiAction(kind="left_click", point=Point(x=500, y=500)))
    capture = await do(desktop, GuiAction(kind="type", text=TEXT))
    assert picture(capture).size == size
    await do(desktop, GuiAction(kind="key", keys=("ctrl", "s")))
    assert await saved(desktop, "note.txt", TEXT) == TEXT


async def test_a_click_and_text_in_one_step_arrive_in_order_in_a_tk_form(
    make: Callable[..., LocalProvider],
) -> None:
    program = """
        import tkinter as tk
        root = tk.Tk()
        root.title("Form")
        entries = [tk.Entry(root) for _ in range(2)]
        for entry in entries:
            entry.place(relx=0.1, rely=0.1 + 0.3 * entries.index(entry), relwidth=0.8, relheight=0.2)
        save = lambda: open("out.txt", "w").write("|".join(entry.get() for entry in entries))
        tk.Button(root, text="Save", command=save).place(relx=0.4, rely=0.8, relwidth=0.2, relheight=0.15)
        root.mainloop()
    """
    desktop = await make(maximise=True).boot(0)
    await desktop.put_file("form.py", textwrap.dedent(program).encode())
    await desktop.launch(["python3", "form.py"])
    await window(desktop, "Form")
    await do(desktop)
    await do(
        desktop,
        GuiAction(kind="left_click", point=at(320, 200)),
        GuiAction(kind="type", text="two"),
        GuiAction(kind="left_click", point=at(320, 90)),
        GuiAction(kind="type", text="öne"),
        GuiAction(kind="left_click", point=at(320, 355)),
    )
    assert await saved(desktop, "out.txt", "öne|two") == "öne|two"


async def test_maximise_gives_the_whole_screen_to_a_normal_window(make: Callable[..., LocalProvider]) -> None:
    desktop = await make(maximise=True).boot(0)
    await desktop.launch(["xterm", "-T", "Wide"])
    await window(desktop, "Wide")
    deadline, size_wh_px = time.monotonic() + 20.0, (0, 0)
    while not (size_wh_px[0] > 620 and size_wh_px[1] > 340):
        assert time.monotonic() < deadline, f"the window is {size_wh_px}"
        await asyncio.sleep(0.1)
        line = (await desktop.run(["wmctrl", "-lG"])).stdout.split()
        size_wh_px = int(line[4]), int(line[5])


async def test_the_screenshot_shows_the_pointer(desktop: Desktop) -> None:
    away = picture(await do(desktop, GuiAction(kind="mouse_move", point=at(20, 20))))
    here = picture(await do(desktop, GuiAction(kind="mouse_move", point=at(300, 200))))
    box = (300, 200, 312, 220)
    assert len(set(away.crop(box).getdata())) == 1
    assert len(set(here.crop(box).getdata())) > 1


async def test_buttons_left_down_are_seen_down_and_a_drag_moves_a_window(desktop: Desktop) -> None:
    await desktop.launch(["xterm", "-T", "Small", "-geometry", "30x5+100+100"])
    await window(desktop, "Small")
    before = (await desktop.run(["wmctrl", "-lG"])).stdout.split()
    x_px, y_px = int(before[2]), int(before[3])
    title_bar = at(x_px + 60, y_px - 30)
    await do(desktop, GuiAction(kind="mouse_move", point=title_bar))
    await do(desktop, GuiAction(kind="left_click_drag", point=at(x_px + 160, y_px + 20)))
    after = (await desktop.run(["wmctrl", "-lG"])).stdout.split()
    assert (int(after[2]) - x_px, int(after[3]) - y_px) == (100, 50)


async def test_a_changing_screen_is_not_settled_and_the_wait_is_bounded(desktop: Desktop) -> None:
    await desktop.launch(["xterm", "-T", "Clock", "-e", "while :; do date +%N; sleep 0.01; done"])
    await window(desktop, "Clock")
    started = time.monotonic()
    capture = await do(desktop, settle=Settle(quiet_ms=150, max_ms=600))
    assert not capture.is_settled
    assert time.monotonic() - started < 3


async def test_a_timeout_ends_the_program_and_all_that_it_started(desktop: Desktop) -> None:
    reply = await code(desktop, "sleep 1000 & (sleep 1000 &) ; setsid sleep 1000 & sleep 1000", timeout_s=0.5)
    assert reply.is_timeout
    assert "sleep 1000" not in (await desktop.run(["ps", "ax"])).stdout


async def test_a_flood_of_output_is_cut_and_costs_no_memory(desktop: Desktop) -> None:
    reply = await code(desktop, "head -c 300000000 /dev/zero | tr '\\0' x; echo end >&2")
    assert reply.is_truncated and len(reply.stdout) == 20_000 and reply.stderr == "end\n"


async def test_a_program_left_running_does_not_hold_the_answer_back(desktop: Desktop) -> None:
    started = time.monotonic()
    reply = await code(desktop, "sleep 30 & echo started")
    assert reply.stdout == "started\n" and time.monotonic() - started < 5


async def test_code_starts_in_home_with_a_display_and_a_python(desktop: Desktop) -> None:
    reply = await code(
        desktop, "pwd; echo $DISPLAY $USER; python -c 'import tkinter; tkinter.Tk(); print(1)'"
    )
    assert reply.stdout.split() == ["/home/user", ":0", "user", "1"]


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


async def test_boot_and_kill_leak_no_file_process_mount_or_group(make: Callable[..., LocalProvider]) -> None:
    provider = make()
    await (await provider.boot(3)).kill()
    before = (num_files(), num_mounts())
    for _ in range(3):
        desktop = await provider.boot(3)
        assert processes_of(FIRST_UID + 3) or os.getuid() != 0
        await desktop.kill()
    assert (num_files(), num_mounts()) == before
    assert await gone(FIRST_UID + 3) == []
    assert not groups("e2e-*-3-*")


OWNER = """
import asyncio, os, sys
from pathlib import Path
from sandbox_cluster.providers.local import LocalProvider
from slime_cua.config.sandbox import DesktopConfig

async def main():
    config = DesktopConfig(screen_wh_px=(640, 384), first_uid=int(sys.argv[2]), boot_timeout_s=120)
    provider = LocalProvider(config, Path(sys.argv[1]), "owner")
    desktops = await asyncio.gather(provider.boot(4), provider.boot(5))
    await desktops[0].launch(["xterm"])
    print("ready", flush=True)
    await asyncio.sleep(100)

if len(sys.argv) > 3:
    import sandbox_cluster.api, sandbox_cluster.guest.agent, encodings.idna
    os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3])); os.environ["HOME"] = "/tmp"
asyncio.run(main())
"""


def is_open_to_all(path: Path) -> bool:
    """Another user can read `path` and the folders above it."""
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in (path, *path.parents))


needs_open_project = pytest.mark.skipif(
    not is_open_to_all(Path.cwd()), reason="other users cannot read the project's folder"
)


@pytest.mark.parametrize("user", [None, pytest.param(FIRST_UID + 90, marks=[needs_root, needs_open_project])])
async def test_nothing_lives_on_when_the_owner_is_killed(tmp_path: Path, user: int | None) -> None:
    uids = (FIRST_UID + 4, FIRST_UID + 5) if user is None else (user,)
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    if user is not None:
        os.chown(state_dir, user, user)
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o755)
    command = [sys.executable, "-c", OWNER, str(state_dir), str(FIRST_UID), *([str(user)] if user else [])]
    mounts, others = num_mounts(), groups("owner-*")
    environment = {**os.environ, "PYTHONPATH": "."}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:  # noqa: ASYNC220
        assert owner.stdout is not None and await asyncio.to_thread(owner.stdout.readline) == "ready\n"
        assert os.getuid() != 0 or any("xterm" in line for line in processes_of(*uids))
        owner.send_signal(signal.SIGKILL)
    for uid in uids if os.getuid() == 0 else ():
        assert await gone(uid) == []
    assert num_mounts() == mounts
    heir = LocalProvider(config(), state_dir, "owner")
    assert await heir.reap() == 0
    assert set(groups("owner-*")) <= set(others)
    assert not list(state_dir.rglob("slot-*.json"))
    await heir.close()


async def test_a_second_owner_of_the_same_label_is_refused(
    make: Callable[..., LocalProvider], tmp_path: Path
) -> None:
    provider = make()
    await provider.boot(0)
    other = LocalProvider(config(), tmp_path / "0", "e2e-0")
    with pytest.raises(SandboxError, match="another running process"):
        await other.reap()
    await other.close()


async def test_a_boot_past_its_deadline_is_an_error_and_leaves_nothing(
    make: Callable[..., LocalProvider],
) -> None:
    provider = make(boot_timeout_s=0.02)
    with pytest.raises(SandboxError, match=r"not ready in 0\.02 s"):
        await provider.boot(6)
    assert await gone(FIRST_UID + 6) == []


async def test_a_cancelled_boot_leaves_nothing_and_frees_the_slot(make: Callable[..., LocalProvider]) -> None:
    provider = make()
    for wait_s in (0.001, 0.03, 0.1):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(provider.boot(7), wait_s)
    assert await gone(FIRST_UID + 7) == []
    await provider.boot(7)


async def test_golden_home_is_copied_and_a_write_stays_in_its_desktop(
    make: Callable[..., LocalProvider], tmp_path: Path
) -> None:
    golden = tmp_path / "golden"
    (golden / "Documents").mkdir(parents=True)
    (golden / "Documents" / "report.txt").write_text("golden")
    provider = make(golden_home=str(golden))
    one, two = await asyncio.gather(provider.boot(0), provider.boot(1))
    await one.put_file("Documents/report.txt", b"changed")
    assert await two.get_file("Documents/report.txt") == b"golden"
    assert (golden / "Documents" / "report.txt").read_text() == "golden"


async def test_osworlds_endpoints_open_edit_and_save_a_file_in_a_real_editor(desktop: Desktop) -> None:
    prefix = "import pyautogui; import time; pyautogui.FAILSAFE = False; "
    transport = httpx.ASGITransport(app=create_app(desktop))
    async with httpx.AsyncClient(transport=transport, base_url="http://guest", timeout=60) as client:

        async def python(text: str) -> dict[str, Any]:
            body = {"command": ["python", "-c", prefix + text], "shell": False}
            return (await client.post("/execute", json=body)).json()

        form = {"file_path": "~/note.txt"}
        await client.post("/setup/upload", data=form, files={"file_data": ("note.txt", b"start ")})
        opened = await client.post("/setup/open_file", json={"path": "~/note.txt"})
        assert opened.status_code == 200, opened.text
        played = await python(
            "pyautogui.hotkey('ctrl', 'End'); pyautogui.write('<é>'); pyautogui.hotkey('ctrl', 's')"
        )
        assert played["returncode"] == 0
        await asyncio.sleep(0.5)
        assert (await client.post("/file", data=form)).content.decode() == "start <é>"
        await python("pyautogui.moveTo(33, 44)")
        assert (await client.get("/cursor_position")).json() == [33, 44]
        real = await python(
            "place = pyautogui.position(); pyautogui.moveTo(place[0] + 7, place[1]); print(pyautogui.size())"
        )
        assert real["output"] == "(640, 384)\n", real
        assert (await client.get("/cursor_position")).json() == [40, 44]
        size = (await client.post("/window_size", data={"app_class_name": "Mousepad"})).json()
        assert size["width"] > 100
        await client.post("/setup/close_window", json={"window_name": "note.txt"})
        async with asyncio.timeout(20):
            while "Mousepad" in (await desktop.run(["wmctrl", "-l"])).stdout:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        checks = {"command": "true", "verification": {"window_exists": "Mousepad"}, "max_wait_time": 0.5}
        assert (await client.post("/execute_with_verification", json=checks)).json()[
            "verification"
        ] == "failed"
        tree = (await client.post("/list_directory", json={"path": "~"})).json()["directory_tree"]
        assert {"type": "file", "name": "note.txt"} in tree["children"]


@needs_root
async def test_empty_groups_of_dead_owners_are_swept_and_groups_in_use_stay() -> None:
    found = limits.find_backend()
    if found.version == 0:
        pytest.skip("no cgroups here")
    own = limits.Backend(found.version, tuple(folder / f"sweep-{os.getpid()}" for folder in found.folders))
    empty, busy = ([folder / name for folder in own.folders] for name in ("empty", "busy"))
    for group in empty + busy:
        group.mkdir(parents=True)
    sleeper = await asyncio.create_subprocess_exec("sleep", "60")
    limits.join(tuple(busy), sleeper.pid)
    assert limits.sweep(own) == 0, "too fresh to judge"
    assert limits.sweep(own, min_age_s=0) == len(empty)
    assert not any(group.exists() for group in empty) and all(group.exists() for group in busy)
    limits.remove_groups(tuple(busy))
    assert await sleeper.wait() == -9
    limits.remove_groups(own.folders)


@needs_root
async def test_two_providers_with_the_same_users_and_label_do_not_touch_each_other(
    make: Callable[..., LocalProvider], tmp_path: Path
) -> None:
    one, two = make(), LocalProvider(config(), tmp_path / "other", "e2e-0")
    first, second = await one.boot(0), await two.boot(0)
    users = [(await desktop.run(["id", "-u"])).stdout for desktop in (first, second)]
    assert users == ["1000\n", "1000\n"]
    assert processes_of(FIRST_UID) and processes_of(FIRST_UID + 1000)
    await second.kill()
    assert await gone(FIRST_UID + 1000) == []
    await first.screenshot()
    await two.close()


async def test_getters_that_list_folders_work_on_a_real_desktop(desktop: Desktop) -> None:
    async def value(kind: str, **getter: Any) -> Any:
        setup = Setup(create_app)
        scene = Scene(
            *(desktop, Inputs(), {}, Jail(), setup.fetch, setup.server(desktop), 0.0),
            end_mono=time.monotonic() + 120,
        )
        await fetch(scene, {"type": kind, **getter})
        return scene.inputs.arguments[0]["value"]

    for name in ("d/Archive/a.docx", "d/.hidden", "d/b.png", "d/C.PNG"):
        await desktop.put_file(f"/home/user/{name}", b"x")
    await desktop.put_file("/home/user/d/names.txt", b"C.PNG\nb.png\n")
    names = {"folder_path": "/home/user/d", "file_path": "/home/user/d/names.txt"}
    assert await value("all_png_file_names", **names) == "true"
    assert await value("is_all_docx_in_archive", folder_path="/home/user/d") == "true"
    assert await value("is_file_hidden", file_path="/home/user/d/.hidden") == "true"
    assert await value("is_file_hidden", file_path="/home/user/d/b.png") == "false"
    await desktop.put_file("/home/user/d/late.docx", b"x")
    await desktop.put_file("/home/user/d/e.png", b"x")
    assert await value("all_png_file_names", **names) == "false"
    assert await value("is_all_docx_in_archive", folder_path="/home/user/d") == "false"
    tree = await value("list_directory", path="/home/user/d")
    assert {child["name"] for child in tree["children"]} >= {"Archive", "b.png"}
    await desktop.put_file("/home/user/Desktop/x.desktop", b"[Desktop Entry]")
    assert await value("shortcuts_on_desktop") == {"x.desktop": "[Desktop Entry]"}
    assert (await value("vm_window_size", app_class_name="nothing")) is None
