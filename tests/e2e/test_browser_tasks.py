"""Browser steps and getters on a real Chromium in a local desktop: what the fake browser of the unit tests cannot vouch for."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_cluster.guest.server import create_app
from sandbox_cluster.judge.getters import Inputs, Scene, fetch
from sandbox_cluster.judge.jail import Jail
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.local import LocalProvider
from sandbox_cluster.tasks.setup import Setup
from slime_cua.config.sandbox import DesktopConfig

pytestmark = [
    pytest.mark.desktop,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed"),
]
CHROMIUM = ["google-chrome", "--remote-debugging-port=9222", "file:///home/user/first.html"]
PAGE = """<title>Shop</title><h3>Head</h3><p class="price old">5 <b>EUR</b></p><p class="price">7</p>
<label>Name of <i>buyer</i></label><input id="who" value=" Ann "><a href="second.html">next</a>"""
TIMEOUT_S = 240.0


@pytest.fixture
async def desktop(tmp_path: Path) -> AsyncIterator[Desktop]:
    config = DesktopConfig(
        screen_wh_px=(800, 600), first_uid=63500, memory_mb=2048, num_processes=512, boot_timeout_s=120
    )
    provider = LocalProvider(config, tmp_path, "browser")
    desktop = await provider.boot(0)
    await desktop.put_file("/home/user/first.html", PAGE.encode())
    await desktop.put_file("/home/user/second.html", b"<title>Second</title><p id=x>two</p>")
    yield desktop
    await provider.close()


async def got(desktop: Desktop, kind: str, **getter: Any) -> Any:
    """The argument as the judge sees it."""
    setup, jail = Setup(create_app), Jail()
    end = time.monotonic() + TIMEOUT_S
    scene = Scene(desktop, Inputs(), {}, jail, setup.fetch, setup.server(desktop), time.time(), end)
    await fetch(scene, {"type": kind, **getter})
    job = {"kind": "parse", "func": "same", "arguments": scene.inputs.arguments}
    verdict = await jail.run(job, scene.inputs.files, TIMEOUT_S)
    assert verdict.reason is None, verdict
    return verdict.value, scene.inputs.files


def step(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"type": kind, "parameters": parameters}


async def test_a_real_browser_is_set_up_and_looked_into(desktop: Desktop) -> None:
    visits = [{"url": "https://visited.example/", "title": "V", "visit_time_from_now_in_seconds": 3600}]
    opened = [f"file:///home/user/{name}.html" for name in ("first", "second")]
    steps = [
        step("update_browse_history", history=visits),
        step("launch", command=CHROMIUM),
        step("chrome_open_tabs", urls_to_open=opened),
        step("chrome_close_tabs", urls_to_close=[opened[1]]),
    ]
    await Setup(create_app).run(desktop, steps, TIMEOUT_S)
    tabs, _ = await got(desktop, "open_tabs_info")
    assert tabs == [{"title": "Shop", "url": opened[0]}]
    assert (await got(desktop, "active_url_from_accessTree"))[0] == opened[0]
    await _parts_of_the_page(desktop)
    info, _ = await got(desktop, "page_info", url=opened[1])
    assert info["title"] == "Second" and info["url"] == opened[1] and "two" in info["content"]
    _, files = await got(desktop, "pdf_from_url", path=opened[1], dest="second.pdf")
    assert files["0/second.pdf"].startswith(b"%PDF-")
    asked = [
        {"action": "inner_text", "selector": "h3"},
        {"action": "attribute", "selector": "#who", "attribute": "value"},
        {"action": "click_and_inner_text", "selector": ["a", "#x"]},
    ]
    found, _ = await got(desktop, "info_from_website", url=opened[0], infos=asked, backups=["failed"])
    assert found == ["Head", " Ann ", "two"]
    await _ended(desktop)
    history, _ = await got(desktop, "history")
    assert "https://visited.example/" in [url for url, _, _ in history], "Chromium kept what the step wrote"
    assert (await got(desktop, "default_search_engine"))[0] == "Google"


async def _parts_of_the_page(desktop: Desktop) -> None:
    parts = {
        "class": {
            "class_singleObject": {"price": "first"},
            "class_multiObject": {"price": {"1": "second", "9": "none"}},
            "class_multiObject_child": {"price": {"0": "direct"}},
        },
        "xpath": {"xpathObject": {"/html/body/h3": "head", "//nothing": "none"}},
        "input": {"inputObject": {"//input": "who"}},
        "label": {"labelObject": {"name of": "label"}},
    }
    right = {
        "class": {"first": "5 EUR", "second": "7", "none": "", "direct": "5"},
        "xpath": {"head": "Head", "none": ""},
        "input": {"who": "Ann"},
        "label": {"label": "Name of buyer"},
    }
    for category, wanted in parts.items():
        found, _ = await got(desktop, "active_tab_html_parse", category=category, **wanted)
        assert found == right[category], category


async def _ended(desktop: Desktop) -> None:
    """Close the browser as a user does, so that its files are whole."""
    await desktop.run(["pkill", "-TERM", "-o", "chromium"])
    for _ in range(600):
        if (await desktop.run(["pgrep", "chromium"])).returncode != 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("chromium did not end")
