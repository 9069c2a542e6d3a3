"""Real applications and real input in local desktops."""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sandbox_cluster.api import Settle
from sandbox_cluster.guest.server import create_app
from sandbox_cluster.judge.getters import Inputs, Scene, fetch
from sandbox_cluster.judge.jail import Jail
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.local import LocalProvider
from sandbox_cluster.tasks.setup import Setup
from slime_cua.core.actions import GuiAction
from slime_cua.core.coordinates import Point
from tests.e2e.local_rig import at, code, do, picture, saved, window

pytestmark = pytest.mark.desktop
TEXT = 'héllo <你好> €Ω 😀 "x" [a]{b}|~\\\nsecond line\tTAB'


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
    capture = await do(desktop, settle=Settle(quiet_ms=3000, max_ms=4000))
    assert not capture.is_settled
    assert 4 <= time.monotonic() - started < 30


@pytest.mark.parametrize("is_moving", [False, True])
async def test_quiet_and_most_of_one_length_are_a_fixed_pause_as_osworld_takes_it(
    desktop: Desktop, is_moving: bool
) -> None:
    if is_moving:
        await desktop.launch(["xterm", "-T", "Clock", "-e", "while :; do date +%N; sleep 0.01; done"])
        await window(desktop, "Clock")
    started = time.monotonic()
    capture = await do(desktop, settle=Settle(quiet_ms=1000, max_ms=1000))
    assert capture.time_s - time.time() + time.monotonic() >= started + 1
    assert time.monotonic() - started < 30


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
