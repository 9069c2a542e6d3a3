"""OSWorld's less used endpoints on real local desktops: each works, or says by name what it needs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from PIL import Image

from sandbox_cluster.api import Settle, StepRequest
from sandbox_cluster.guest.server import create_app
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.local import LocalProvider
from slime_cua.config.sandbox import DesktopConfig

pytestmark = pytest.mark.desktop
HAS_ATSPI = (
    Path("/usr/libexec/at-spi-bus-launcher").exists()
    and Path("/usr/lib/python3/dist-packages/gi").exists()
    and any(Path("/usr/lib").glob("*/girepository-1.0/Atspi-2.0.typelib"))
)
STATE = "{https://accessibility.ubuntu.example.org/ns/state}"
PLACE = "{https://accessibility.ubuntu.example.org/ns/component}"


@contextlib.asynccontextmanager
async def guest(folder: Path, **config: object) -> AsyncIterator[tuple[Desktop, httpx.AsyncClient]]:
    settings = DesktopConfig.model_validate({"screen_wh_px": (640, 384), "boot_timeout_s": 90, **config})
    provider = LocalProvider(settings, folder, "endpoints")
    await provider.check()
    try:
        desktop = await provider.boot(0)
        transport = httpx.ASGITransport(app=create_app(desktop))
        async with httpx.AsyncClient(transport=transport, base_url="http://guest", timeout=120) as client:
            yield desktop, client
    finally:
        await provider.close()


@pytest.mark.skipif(not HAS_ATSPI, reason="needs at-spi2-core, gir1.2-atspi-2.0 and python3-gi")
async def test_the_tree_has_what_a_program_shows_with_its_place_and_state(tmp_path: Path) -> None:
    async with guest(tmp_path, accessibility=True) as (desktop, client):
        await desktop.put_file("note.txt", b"Tom & Ann <3")
        opened = await client.post("/setup/open_file", json={"path": "/home/user/note.txt"})
        assert opened.status_code == 200, opened.text
        for _ in range(60):
            root = ET.fromstring((await client.get("/accessibility")).json()["AT"])
            texts = {element.text: element for element in root.iter() if element.text}
            if "Tom & Ann <3" in texts and root.find(".//frame//menu-bar") is not None:
                break  # the text is there before the bar above it, now and then
            await asyncio.sleep(0.5)
        assert root.tag == "desktop-frame"
        assert root.find(".//frame//menu-bar") is not None
        text = texts["Tom & Ann <3"]
        assert text.get(f"{STATE}showing") == "true" and text.get(f"{STATE}editable") == "true"
        x, y = (int(part) for part in str(text.get(f"{PLACE}screencoord")).strip("()").split(","))
        assert 0 <= x < 640 and 0 <= y < 384


async def test_without_a_bus_the_tree_is_empty_and_says_what_to_set(tmp_path: Path) -> None:
    async with guest(tmp_path) as (_, client):
        reply = (await client.get("/accessibility")).json()
        assert (
            "sandbox.accessibility=true" in reply["reason"]
            and ET.fromstring(reply["AT"]).tag == "desktop-frame"
        )
        terminal = (await client.get("/terminal")).json()
        assert (
            terminal["output"] is None
            and terminal["status"] == "success"
            and "accessibility" in terminal["reason"]
        )


async def test_a_recording_is_a_video_of_the_screen_or_names_what_is_missing(tmp_path: Path) -> None:
    async with guest(tmp_path) as (desktop, client):
        assert (await client.post("/end_recording")).status_code == 400
        started = await client.post("/start_recording")
        if shutil.which("ffmpeg") is None:
            assert started.status_code == 501 and "apt-get install" in started.json()["message"]
            return
        assert started.status_code == 200, started.text
        assert (await client.post("/start_recording")).status_code == 400
        await desktop.step(StepRequest(action_id="a", settle=Settle(quiet_ms=800, max_ms=1000)))
        ended = await client.post("/end_recording")
        assert ended.status_code == 200 and ended.content[4:8] == b"ftyp"
        assert (await client.post("/end_recording")).status_code == 400


async def test_a_wallpaper_is_shown_and_given_back_or_the_missing_program_is_named(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 90)).save(file, "PNG")
    async with guest(tmp_path) as (desktop, client):
        assert (await client.post("/wallpaper")).status_code == 404
        assert (await client.post("/setup/change_wallpaper", json={"path": "/none.png"})).status_code == 404
        await desktop.put_file("Pictures/red.png", file.getvalue())
        changed = await client.post("/setup/change_wallpaper", json={"path": "~/Pictures/red.png"})
        if shutil.which("feh") is None:
            assert changed.status_code == 501 and "feh" in changed.json()["message"]
            return
        assert changed.status_code == 200, changed.text
        assert (await client.post("/wallpaper")).content == file.getvalue()
        shot = await desktop.step(StepRequest(action_id="a", settle=Settle(quiet_ms=300, max_ms=5000)))
        assert Image.open(io.BytesIO(shot.png)).convert("RGB").getpixel((600, 300)) == (200, 30, 90)


@pytest.mark.skipif(
    not HAS_ATSPI or not shutil.which("xfce4-terminal"), reason="needs AT-SPI and xfce4-terminal"
)
async def test_a_terminal_gives_its_text(tmp_path: Path) -> None:
    async with guest(tmp_path, accessibility=True) as (desktop, client):
        await desktop.launch(
            ["xfce4-terminal", "--disable-server", "--command", "sh -c 'echo out $((6*7)); sleep 300'"]
        )
        for _ in range(60):
            reply = (await client.get("/terminal")).json()
            if reply["output"] and "out 42" in reply["output"]:
                return
            await asyncio.sleep(0.5)
        raise AssertionError(reply)
