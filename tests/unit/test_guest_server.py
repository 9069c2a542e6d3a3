"""OSWorld's endpoints over a desktop: paths, methods, bodies and answers that its client expects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox_cluster.guest.server import create_app
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.fake import EVENT_LOG, FakeProvider
from slime_cua.config.sandbox import DesktopConfig

PREFIX = "import pyautogui; import time; pyautogui.FAILSAFE = False; "


@pytest.fixture
async def desktop(tmp_path: Path) -> Desktop:
    return await FakeProvider(DesktopConfig(screen_wh_px=(640, 384)), tmp_path, "x").boot(0)


@pytest.fixture
async def client(desktop: Desktop) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(desktop, pause_s=0))
    async with httpx.AsyncClient(transport=transport, base_url="http://guest") as made:
        yield made


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    return await client.post(path, json=body)


async def test_the_screenshot_is_png_and_looks_have_osworlds_methods(client: httpx.AsyncClient) -> None:
    picture = await client.get("/screenshot")
    assert picture.headers["content-type"] == "image/png" and picture.content.startswith(b"\x89PNG")
    assert (await client.post("/screen_size")).json() == {"width": 640, "height": 384}
    assert (await client.get("/screen_size")).status_code == 405
    assert (await client.get("/platform")).text == "Linux"
    terminal = (await client.get("/terminal")).json()
    assert terminal["output"] is None and terminal["status"] == "success" and terminal["reason"]
    assert "reason" in (await client.get("/accessibility")).json()
    assert (await client.post("/desktop_path")).json() == {"desktop_path": "/home/user/Desktop"}


@pytest.mark.parametrize("path", ["/execute", "/setup/execute"])
@pytest.mark.parametrize(
    ("body", "output", "code"),
    [
        ({"command": ["echo", "a b"], "shell": False}, "a b\n", 0),
        ({"command": "echo 'a b'", "shell": False}, "a b\n", 0),
        ({"command": "echo a; exit 3", "shell": True}, "a\n", 3),
        ({"command": "echo a; exit 3", "shell": "true"}, "a\n", 3),
        ({"command": ["echo a"], "shell": True}, "a\n", 0),
    ],
)
async def test_a_command_that_ran_is_200_with_its_code_inside(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], output: str, code: int
) -> None:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200
    assert reply.json() == {"status": "success", "output": output, "error": "", "returncode": code}


@pytest.mark.parametrize("command", [["no-such-program"], "", [], None])
async def test_a_command_that_never_started_is_500(client: httpx.AsyncClient, command: Any) -> None:
    reply = await post(client, "/execute", command=command, shell=False)
    assert reply.status_code == 500 and reply.json()["status"] == "error"


async def test_a_pyautogui_command_is_played_once_without_a_process(
    client: httpx.AsyncClient, desktop: Desktop
) -> None:
    command = ["python", "-c", PREFIX + "pyautogui.click(10, 20)"]
    reply = await post(client, "/execute", command=command, shell=False)
    assert reply.json() == {"status": "success", "output": "", "error": "", "returncode": 0}
    log = (await desktop.get_file(EVENT_LOG)).decode().splitlines()
    assert log[0].startswith("Move(x_px=10, y_px=20") and len([line for line in log if "Button" in line]) == 2


async def test_a_pyautogui_command_that_cannot_be_played_plays_nothing(
    client: httpx.AsyncClient, desktop: Desktop
) -> None:
    command = ["python", "-c", PREFIX + "pyautogui.click(10, 20); pyautogui.press('entr')"]
    reply = (await post(client, "/execute", command=command)).json()
    assert reply["returncode"] == 1 and "unknown key" in reply["error"]
    assert await desktop.get_file(EVENT_LOG) == b""


async def test_python_that_is_no_list_of_calls_runs_for_real(client: httpx.AsyncClient) -> None:
    reply = (await post(client, "/execute", command=["python", "-c", "print(40 + 2)"])).json()
    assert (reply["output"], reply["returncode"]) == ("42\n", 0)


async def test_run_python_answers_with_return_code_and_run_bash_script_with_returncode(
    client: httpx.AsyncClient,
) -> None:
    good = (await post(client, "/run_python", code="print('hi')")).json()
    assert (good["status"], good["output"], good["return_code"], good["need_more"]) == (
        "success",
        "hi\n",
        0,
        False,
    )
    bad = (await post(client, "/run_python", code="sys.exit(2)")).json()
    assert (bad["status"], bad["return_code"]) == ("error", 2)
    assert (await post(client, "/run_python", code="")).status_code == 400
    script = (await post(client, "/run_bash_script", script="echo out; echo err 1>&2")).json()
    assert script == {"status": "success", "output": "out\nerr\n", "error": "", "returncode": 0}
    assert (await post(client, "/run_bash_script", script="")).status_code == 400


async def test_a_script_past_its_time_is_200_so_that_it_is_not_sent_again(client: httpx.AsyncClient) -> None:
    reply = await post(client, "/run_bash_script", script="echo a; sleep 20", timeout=0.2)
    assert reply.status_code == 200
    assert reply.json()["returncode"] == -1 and "timed out" in reply.json()["output"]


async def test_an_uploaded_file_comes_back_and_a_missing_one_is_404(client: httpx.AsyncClient) -> None:
    data = bytes(range(256))
    sent = await client.post("/setup/upload", data={"file_path": "~/a.bin"}, files={"file_data": ("a", data)})
    assert (sent.status_code, sent.text) == (200, "File Uploaded: 256 bytes")
    for path in ("/home/user/a.bin", "~/a.bin", "$HOME/a.bin"):
        assert (await client.post("/file", data={"file_path": path})).content == data
    assert (await client.post("/file", data={"file_path": "/none"})).status_code == 404
    assert (await client.post("/file")).status_code == 400


async def test_launch_says_so_in_text(client: httpx.AsyncClient) -> None:
    reply = await post(client, "/setup/launch", command=["sleep", "0"], shell=False)
    assert (reply.status_code, reply.text) == (200, "sleep 0 launched successfully")
    assert (await post(client, "/setup/launch", command=["none"])).status_code == 500


async def test_what_is_not_offered_is_501_with_a_reason(client: httpx.AsyncClient) -> None:
    reply = await client.post("/setup/download_file")
    assert reply.status_code == 501 and "no network" in reply.json()["message"]


async def test_a_broken_body_is_400_and_a_dead_desktop_503(
    client: httpx.AsyncClient, desktop: Desktop
) -> None:
    assert (await client.post("/execute", content=b"{")).status_code == 400
    assert (await client.post("/execute", content=b"[]")).status_code == 400
    await desktop.kill()
    assert (await client.get("/screenshot")).status_code == 503
    assert (await post(client, "/execute", command=["true"])).status_code == 503
