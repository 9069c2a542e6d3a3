"""What is particular to machines with a control server of their own: Windows, clocks, broken bash, resets."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from sandbox_cluster.api import ExecuteRequest, Settle, StepRequest
from sandbox_cluster.client import SandboxClient
from sandbox_cluster.cluster import LocalCluster
from sandbox_cluster.guest.events import Button, Key, Move, Pause, Text, compile_actions
from sandbox_cluster.guest.forward import application
from sandbox_cluster.guest.pyautogui import compile_program
from sandbox_cluster.guest.pyautogui_text import program_text
from sandbox_cluster.providers import kvm
from sandbox_cluster.providers.osworld_driver import _least
from sandbox_cluster.providers.osworld_http import ControlServer
from sandbox_cluster.providers.remote import RemoteProvider
from slime_cua.config.sandbox import DesktopConfig, RemoteConfig, SandboxConfig
from slime_cua.core.actions import CodeAction, GuiAction
from slime_cua.core.coordinates import Point
from slime_cua.core.errors import PreflightError, SandboxError
from tests.contract.provider_rigs import remote_machines

SUPERVISE = Path(__file__).resolve().parents[2] / "sandbox_cluster/guest/supervise.py"


@pytest.fixture(params=["ubuntu", "windows"])
async def remote(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RemoteProvider]:
    async with remote_machines(tmp_path, windows=request.param == "windows") as config:
        provider = RemoteProvider(config, tmp_path, "x")
        await provider.check()
        yield provider
        await provider.close()


@pytest.mark.desktop
async def test_input_arrives_as_pyautogui_calls_on_both_systems(remote: RemoteProvider) -> None:
    desktop = await remote.boot(0)
    actions = (
        GuiAction(kind="left_click", point=Point(x=500, y=500), keys=("ctrl",)),
        GuiAction(kind="scroll", scroll_clicks=-3),
        GuiAction(kind="type", text="a<b"),
    )
    await desktop.step(StepRequest(action_id="a", actions=actions, settle=Settle(quiet_ms=0, max_ms=0)))
    log = await desktop.run(["cat", "/home/user/events.log"], cwd="/")
    lines = log.stdout.splitlines()
    notch = 120 if desktop.platform.is_windows else 1
    assert lines[:5] == [
        "keyDown('ctrl',)",
        "moveTo(320, 192)",
        "mouseDown(){'button': 'left'}",
        "mouseUp(){'button': 'left'}",
        "keyUp('ctrl',)",
    ]
    assert lines[5:] == [f"scroll({-3 * notch},)", "write('a',)", "hotkey('shift', ',')", "write('b',)"]


@pytest.mark.desktop
async def test_bash_is_refused_by_name_where_there_is_none(tmp_path: Path) -> None:
    async with remote_machines(tmp_path, windows=True) as config:
        provider = RemoteProvider(config, tmp_path, "x")
        desktop = await provider.boot(0)
        with pytest.raises(ValueError, match="bash is not there on windows desktops; use python"):
            await desktop.execute(
                ExecuteRequest(action_id="b", action=CodeAction(language="bash", code="true"))
            )
        await provider.close()


@pytest.mark.desktop
async def test_a_broken_bash_endpoint_is_served_by_us_and_runs_the_script_once(
    remote: RemoteProvider,
) -> None:
    desktop = await remote.boot(0)
    if desktop.platform.is_windows:
        pytest.skip("WindowsAgentArena's server has no such endpoint")
    direct = await ControlServer(desktop.control_url, desktop.platform).has_broken_bash()
    transport = httpx.ASGITransport(app=application(desktop))
    async with httpx.AsyncClient(transport=transport, base_url="http://desktop") as client:
        ran = await client.post("/run_bash_script", json={"script": "echo x | tee -a count", "timeout": 20})
        assert direct and ran.status_code == 200 and ran.json()["output"] == "x\n"
        assert await desktop.get_file("count") == b"x\n"
        assert (await client.get("/platform")).text == "Linux"
        missing = await client.post("/file", data={"file_path": "/none"})
        assert missing.status_code == 404
        assert (await client.post("/nothing")).status_code == 404


@pytest.mark.desktop
@pytest.mark.parametrize("system", ["ubuntu", "windows"])
async def test_a_leased_machine_is_driven_and_set_up_through_the_gateway(tmp_path: Path, system: str) -> None:
    async with remote_machines(tmp_path, windows=system == "windows") as machines:
        plain = {**machines.model_dump(), "provider": "remote", "num_desktops": 1, "num_spares": 1}
        config = SandboxConfig.model_validate({**plain, "settle_quiet_ms": 0})
        async with (
            LocalCluster(config, tmp_path / "cluster") as cluster,
            SandboxClient(cluster.url, cluster.token, config) as client,
            client.lease(key="k") as sandbox,
            httpx.AsyncClient(base_url=cluster.url, trust_env=False, timeout=60) as osworld,
        ):
            assert sandbox.lease.os == system and sandbox.lease.provider == "remote"
            shot = await sandbox.step([GuiAction(kind="mouse_move", point=Point(x=1, y=1))])
            assert shot.png.startswith(b"\x89PNG")
            answer = await osworld.get(f"{sandbox.osworld_path}/platform")
            assert answer.text == ("Windows" if system == "windows" else "Linux")
            body = {"command": "echo hi", "shell": True}
            ran = await osworld.post(f"{sandbox.osworld_path}/execute", json=body)
            assert ran.json()["output"] == "hi\n"


@pytest.mark.desktop
async def test_a_program_longer_than_one_call_is_waited_for(
    remote: RemoteProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    desktop = await remote.boot(0)
    monkeypatch.setattr("sandbox_cluster.providers.osworld_driver.PATIENCE_S", 0.2)
    reply = await desktop.run(["bash", "-c", "sleep 1.5; echo done; exit 3"], timeout_s=30, cwd="/")
    assert (reply.stdout, reply.returncode) == ("done\n", 3)


@pytest.mark.desktop
async def test_another_screen_size_is_named_with_what_to_set(tmp_path: Path) -> None:
    async with remote_machines(tmp_path) as config:
        other = config.model_copy(update={"screen_wh_px": (1920, 1080)})
        provider = RemoteProvider(other, tmp_path, "x")
        with pytest.raises(
            SandboxError, match=r"screen of 640x384: set sandbox.screen_wh_px to \[640, 384\]"
        ):
            await provider.boot(0)
        await provider.close()


async def test_a_failing_reset_gives_no_desktop_and_says_why(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import sys; print('no such snapshot {slot}'); sys.exit(4)")
    remote = RemoteConfig(urls=("http://127.0.0.1:9",), reset_command=command)
    provider = RemoteProvider(DesktopConfig(remote=remote), tmp_path, "x")
    with pytest.raises(SandboxError, match="failed with 4: no such snapshot 0"):
        await provider.boot(0)
    with pytest.raises(SandboxError, match="failed with 4"):
        await provider.boot(0)
    with pytest.raises(SandboxError, match="no machine for slot 1"):
        await provider.boot(1)


@pytest.mark.parametrize(
    ("remote", "message"),
    [
        ({}, "needs sandbox.remote.urls"),
        ({"urls": ("http://a:1",)}, "reset_command"),
        ({"urls": ("http://a:1", "http://a:1"), "reset": "none"}, "two owners"),
        ({"urls": ("a:1",), "reset": "none"}, "write http://HOST:PORT"),
        ({"urls": ("http://a:1",), "reset": "endpoints"}, "WindowsAgentArena"),
    ],
)
async def test_a_config_that_would_leak_state_or_share_machines_is_refused(
    tmp_path: Path, remote: dict[str, object], message: str
) -> None:
    config = DesktopConfig(remote=RemoteConfig.model_validate(remote))
    with pytest.raises(PreflightError, match=message):
        await RemoteProvider(config, tmp_path, "x").check()


def test_our_own_reader_of_pyautogui_reads_back_what_was_written() -> None:
    actions = (
        GuiAction(kind="double_click", point=Point(x=10, y=20)),
        GuiAction(kind="key", keys=("ctrl", "shift", "s")),
        GuiAction(kind="type", text="a\tb\n'\"\\"),
        GuiAction(kind="hscroll", scroll_clicks=2),
    )
    events = [event for event in compile_actions(actions, (1000, 1000)) if not isinstance(event, Pause)]
    assert list(compile_program(program_text(events))) == events


def test_text_outside_ascii_takes_the_other_way() -> None:
    text = program_text([Text("naïve 你好")])
    assert "pyautogui.write('na')" in text and "type_others('ï')" in text and "type_others('你好')" in text
    compile(text, "program", "exec")


def test_names_of_keys_are_pyautoguis() -> None:
    text = program_text(
        [Key("Return", True), Key("super", False), Key("A", True), Move(1, 2), Button(3, True)]
    )
    assert text.splitlines()[1:] == [
        "pyautogui.keyDown('enter')",
        "pyautogui.keyUp('win')",
        "pyautogui.keyDown('A')",
        "pyautogui.moveTo(1, 2)",
        "pyautogui.mouseDown(button='right')",
    ]


@pytest.mark.parametrize(
    ("bounds", "least"), [((-0.2, 0.3), 0.0), ((2.0, 2.5), 2.0), ((-7.0, -6.5), -6.5), ((0.0, 0.0), 0.0)]
)
def test_only_a_skew_that_is_sure_counts(bounds: tuple[float, float], least: float) -> None:
    assert _least(bounds) == least


class _Clock(ControlServer):
    """A control server whose desktop is some seconds off; `step_time` works, or not."""

    def __init__(self, skew_s: float, can_step: bool) -> None:
        from sandbox_cluster.providers.base import LINUX

        super().__init__("http://127.0.0.1:9", LINUX)
        self.skew_s, self.can_step, self.steps = skew_s, can_step, 0

    async def call(self, method, path, body=b"", kind="", timeout_s=1.0):  # type: ignore[no-untyped-def,override]
        from sandbox_cluster.guest.png import encode_solid
        from sandbox_cluster.wire import Reply

        if path == "/screen_size":
            return Reply(200, {}, b'{"width": 8, "height": 8}')
        return Reply(200, {}, encode_solid((8, 8), (1, 2, 3)))

    async def supervised(self, request, timeout_s=1.0):  # type: ignore[no-untyped-def,override]
        import time

        if request["op"] == "step_time":
            self.steps += 1
            self.skew_s += request["seconds"] if self.can_step else 0.0
            return {"rc": 0, "said": "date: cannot set date: Operation not permitted"}
        return {"now": time.time() + self.skew_s}


async def test_a_frozen_guest_clock_is_stepped_before_hand_out_and_one_that_cannot_be_is_not_handed_out() -> (
    None
):
    """Case R42: a snapshot taken three days ago."""
    from sandbox_cluster.providers.osworld_driver import OSWorldDriver, make_ready

    async def end() -> None:
        pass

    frozen = _Clock(1699740803 - 1700000000, can_step=True)
    assert abs(await make_ready(OSWorldDriver(frozen, (8, 8), {}, end), 5.0, "password")) <= 1.0
    assert frozen.steps == 1 and abs(frozen.skew_s) < 1.0
    right = _Clock(0.3, can_step=True)
    await make_ready(OSWorldDriver(right, (8, 8), {}, end), 5.0, "password")
    assert right.steps == 0
    stuck = _Clock(-90.0, can_step=False)
    driver = OSWorldDriver(stuck, (8, 8), {}, end)
    with pytest.raises(SandboxError, match=r"-90\.0 s off and cannot be set: date: cannot set"):
        await make_ready(driver, 5.0, "password")
    assert not driver.is_alive


async def test_an_answer_that_is_no_picture_is_not_health() -> None:
    """Case R41: HTTP 200 alone is not healthy."""
    from sandbox_cluster.providers.osworld_driver import OSWorldDriver, make_ready
    from sandbox_cluster.wire import Reply

    class Blind(_Clock):
        async def call(self, method, path, body=b"", kind="", timeout_s=1.0):  # type: ignore[no-untyped-def,override]
            return Reply(200, {}, b"<html>starting</html>")

    async def end() -> None:
        pass

    with pytest.raises(SandboxError, match=r"was not ready in 0\.5 s"):
        await make_ready(OSWorldDriver(Blind(0.0, True), (8, 8), {}, end), 0.5, "password")


@pytest.mark.parametrize("wh_px", [(10_000, 8_000), (60_000, 60_000)])
async def test_a_picture_that_would_fill_the_hosts_memory_is_refused_before_it_is_read(
    wh_px: tuple[int, int],
) -> None:
    """A PNG of a few hundred kilobytes may unpack to gigabytes."""
    from sandbox_cluster.providers.osworld_driver import OSWorldDriver
    from sandbox_cluster.wire import Reply

    header = b"IHDR" + struct.pack(">IIBBBBB", *wh_px, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    picture = start + struct.pack(">I", 1 << 20) + b"IDAT" + zlib.compress(bytes(1 << 20))

    class Bomb(_Clock):
        async def call(self, method, path, body=b"", kind="", timeout_s=1.0):  # type: ignore[no-untyped-def,override]
            return Reply(200, {}, picture)

    async def end() -> None:
        pass

    driver = OSWorldDriver(Bomb(0.0, True), (8, 8), {}, end)
    with pytest.raises(SandboxError, match=r"nothing of it was read|broken screenshot.*bomb"):
        await driver.capture(Settle(quiet_ms=0, max_ms=0))


def test_the_watching_program_gives_the_error_number_of_a_bad_start() -> None:
    request = {
        "op": "run",
        "argv": ["/none"],
        "cwd": "/",
        "timeout": 5,
        "cap": 10,
        "merged": False,
        "detached": False,
    }
    text = base64.b64encode(json.dumps({**request, "suffix": ""}).encode()).decode()
    done = subprocess.run([sys.executable, str(SUPERVISE), text], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["errno"] == 2


async def test_a_probe_guest_that_runs_says_its_number_and_one_that_does_not_is_a_fault() -> None:
    """The probe's program is right: without KVM, emulated, its guest does run."""
    if kvm.qemu_is_missing():
        pytest.skip("needs qemu-system-x86_64")
    emulated = kvm.probe_script("max").replace("-accel kvm", "-accel tcg").replace("KILL 20", "KILL 200")
    process = await asyncio.create_subprocess_exec("/bin/sh", "-c", emulated)
    assert await process.wait() == kvm.PROBE_EXIT_CODE
    assert kvm.fault_of(kvm.PROBE_EXIT_CODE, "") is None
    assert "Killed" in str(kvm.fault_of(137, "Killed\n"))
