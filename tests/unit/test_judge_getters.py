"""What getters bring: files and commands of a fake desktop, the profile of a browser, and a browser that answers like Chrome."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
import time
import zipfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from sandbox_cluster.guest.png import encode_solid
from sandbox_cluster.guest.server import create_app
from sandbox_cluster.judge import kinds
from sandbox_cluster.judge.getter_sites import macys_filters
from sandbox_cluster.judge.getters import FUNCTIONS, Inputs, Scene, fetch
from sandbox_cluster.judge.jail import Jail, JailConfig, default_site
from sandbox_cluster.providers.base import CDP_PORT, VLC_PORT
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.fake import FakeProvider
from sandbox_cluster.tasks.browser_steps import history_file, same_url
from sandbox_cluster.tasks.setup import Setup
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.errors import JudgeError, SandboxError
from tests.unit.fake_browser import FakeBrowser

needs_jail = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
PROFILE = "/home/user/.config/google-chrome"
NOW_S = 1_772_712_000.0
"""2026-03-05T12:00 UTC."""


@pytest.fixture
async def desktop(tmp_path: Path) -> AsyncIterator[Desktop]:
    provider = FakeProvider(DesktopConfig(screen_wh_px=(64, 64)), tmp_path, "getters")
    yield await provider.boot(0)
    await provider.close()


def scene(desktop: Desktop, cache: Mapping[str, bytes] | None = None) -> Scene:
    setup = Setup(create_app, ("http://127.0.0.1",))
    jail = Jail(JailConfig())
    end = time.monotonic() + 120
    return Scene(desktop, Inputs(), cache or {}, jail, setup.fetch, setup.server(desktop), NOW_S, end)


async def got(desktop: Desktop, kind: str, **getter: Any) -> Any:
    """The argument as it goes into the jail."""
    view = scene(desktop)
    await fetch(view, {"type": kind, **getter})
    return view.inputs.arguments[0]


async def seen(desktop: Desktop, kind: str, **getter: Any) -> Any:
    """The argument as the judge sees it: parsed in the jail."""
    view = scene(desktop)
    await fetch(view, {"type": kind, **getter})
    job = {"kind": "parse", "func": "same", "arguments": view.inputs.arguments}
    verdict = await view.jail.run(job, view.inputs.files, 120.0)
    assert verdict.reason is None, verdict
    return verdict.value


def drive(desktop: Desktop, browser: FakeBrowser) -> None:
    desktop._driver.ports[CDP_PORT] = browser.port  # type: ignore[attr-defined]


def test_every_getter_that_loads_can_be_fetched_and_no_name_is_both() -> None:
    assert set(kinds.GETTERS) == set(FUNCTIONS)
    assert not set(kinds.GETTERS) & set(kinds.REFUSED_GETTERS)
    assert not set(kinds.UPSTREAM) & set(kinds.REFUSED_METRICS)


async def test_several_files_come_in_and_gives_counts_out_those_for_the_judge(desktop: Desktop) -> None:
    await desktop.put_file("/home/user/a.csv", b"a")
    view = scene(desktop)
    several = {"multi": True, "path": ["/home/user/a.csv", "/home/user/b.csv"], "dest": ["x.csv", "y.csv"]}
    await fetch(view, {"type": "vm_file", **several, "gives": [0, 1]})
    assert view.inputs.arguments == [{"files": ["/job/in/0/x.csv", None]}]
    await fetch(view, {"type": "vm_file", **several})
    assert view.inputs.arguments[1] == {"file": "/job/in/1/x.csv"}
    assert view.inputs.files == {"0/x.csv": b"a", "1/x.csv": b"a"}


async def test_relative_dates_refer_to_the_scenes_moment(desktop: Desktop) -> None:
    rules = {"relativeTime": {"from": "tomorrow"}, "expected": {"time": "{Year}-{Month0D}-{Day0D}"}}
    value = (await got(desktop, "rule_relativeTime", rules=rules))["value"]
    assert value["expected"] == {"time": "2026-03-06"}


async def test_windows_getters_look_for_files(desktop: Desktop) -> None:
    await desktop.put_file("/home/user/Desktop/n.txt", "\ufeff585 days".encode("utf-16"))
    assert (await got(desktop, "is_file_desktop", filename="n.txt"))["value"] == "true"
    assert (await got(desktop, "is_file_desktop", filename="m.txt"))["value"] == "false"
    saved = {"filename": "n.txt", "textcontent": "585 days"}
    assert (await got(desktop, "is_file_saved_desktop", **saved))["value"] == "true"
    where = {"folder_name": "/home/user/Desktop", "file_name": "n.txt"}
    assert (await got(desktop, "vm_file_exists_in_vm_folder", **where))["value"] is True


@needs_jail
async def test_a_pictures_size_is_read_in_the_jail(desktop: Desktop) -> None:
    await desktop.put_file("/home/user/p.png", encode_solid((80, 60), (1, 2, 3)))
    await desktop.put_file("/home/user/q.png", b"no picture")
    asked = {"width": "80", "height": "60"}
    for path, right in (("p.png", True), ("q.png", False), ("gone.png", False)):
        given = await got(desktop, "image_dimension_matches_input", filepath=f"/home/user/{path}", **asked)
        assert given["value"] is right, path


@needs_jail
@pytest.mark.skipif(not default_site(), reason="the jail's Python has no Pillow: another version than ours")
async def test_a_picture_with_a_circle_is_looked_at_in_the_jail(desktop: Desktop) -> None:
    image, buffer = Image.new("RGB", (200, 200), "white"), io.BytesIO()
    ImageDraw.Draw(image).ellipse((50, 50, 150, 150), outline="red", width=2)
    image.save(buffer, "PNG")
    await desktop.put_file("/home/user/p.png", buffer.getvalue())
    for path, right in (("p.png", True), ("gone.png", False)):
        view = scene(desktop)
        view.jail = Jail()
        await fetch(view, {"type": "is_red_circle_present_on_canvas", "filepath": f"/home/user/{path}"})
        assert view.inputs.arguments == [{"value": right}], path


@needs_jail
async def test_a_browsers_settings_are_read_in_the_jail(desktop: Desktop) -> None:
    settings = {
        "profile": {"name": "Thomas"},
        "enable_do_not_track": True,
        "extensions": {"settings": {"a": {"path": "/x", "manifest": {"name": "X"}}, "b": {"path": "/y"}}},
    }
    await desktop.put_file(f"{PROFILE}/Default/Preferences", json.dumps(settings).encode())
    assert await seen(desktop, "profile_name") == "Thomas"
    assert await seen(desktop, "enable_do_not_track") == "true"
    assert await seen(desktop, "default_search_engine") == "Google"
    assert await seen(desktop, "find_unpacked_extension_path") == ["/x", "/y"]


@needs_jail
async def test_a_settings_file_that_is_broken_gives_what_osworld_gives(desktop: Desktop) -> None:
    await desktop.put_file(f"{PROFILE}/Default/Preferences", b"\xff{")
    await desktop.put_file(f"{PROFILE}/Default/History", b"SQLite format 3\0" + b"\xee" * 5000)
    assert await seen(desktop, "enable_do_not_track") == "false"
    assert await seen(desktop, "profile_name") is None
    assert await seen(desktop, "history") is None


@needs_jail
async def test_history_that_a_step_wrote_is_what_the_getter_reads(desktop: Desktop) -> None:
    visits = [{"url": "https://a.example/", "title": "A", "visit_time_from_now_in_seconds": 60}]
    step = {"type": "update_browse_history", "parameters": {"history": visits}}
    await Setup(create_app).run(desktop, [step], 60.0)
    [[url, title, moment]] = await seen(desktop, "history", dest="h")
    assert (url, title) == ("https://a.example/", "A")
    assert abs(moment / 1_000_000 - 11_644_473_600 + 60 - time.time()) < 60


def test_a_written_history_is_a_database_that_chrome_knows(tmp_path: Path) -> None:
    (tmp_path / "History").write_bytes(history_file([], NOW_S))
    with sqlite3.connect(tmp_path / "History") as base:
        tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert {"meta", "urls", "visits"} <= tables
        assert base.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def slide(target: str) -> bytes:
    relation = f'<R xmlns="r"><r Type="http://x/audio" Id="r1" Target="{target}"/></R>'
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ppt/slides/_rels/slide2.xml.rels", relation)
        file.writestr("ppt/media/a.mp3", b"sound")
    return archive.getvalue()


@needs_jail
@pytest.mark.parametrize(
    ("target", "right"),
    [
        ("../media/a.mp3", "/tmp/a.mp3"),
        ("file:///home/user/b.mp3", "/job/in/0/s.mp3"),
        ("file:///gone", None),
    ],
)
async def test_a_slides_sound_is_found_inside_and_outside(
    desktop: Desktop, target: str, right: str | None
) -> None:
    await desktop.put_file("/home/user/s.pptx", slide(target))
    await desktop.put_file("/home/user/b.mp3", b"other sound")
    asked = {"ppt_file_path": "/home/user/s.pptx", "slide_index": 1, "dest": "s.mp3"}
    assert await seen(desktop, "audio_in_slide", **asked) == right


async def test_a_browsers_tabs_are_opened_closed_and_listed(desktop: Desktop) -> None:
    async with FakeBrowser(["chrome://newtab/"]) as chrome:
        drive(desktop, chrome)
        chrome.never_load.add("https://slow.example/")
        opening = {"urls_to_open": ["https://a.example/", "https://www.b.example/x"]}
        steps = [
            {"type": "chrome_open_tabs", "parameters": opening},
            {"type": "chrome_close_tabs", "parameters": {"urls_to_close": ["http://b.example/x/"]}},
        ]
        await Setup(create_app).run(desktop, steps, 120.0)
        assert (await got(desktop, "open_tabs_info"))["value"] == [
            {"title": "title of https://a.example/", "url": "https://a.example/"}
        ]
        assert set(chrome.hosts) == {f"127.0.0.1:{CDP_PORT}"}


async def test_the_active_tab_is_asked_of_the_browser_without_an_accessibility_tree(desktop: Desktop) -> None:
    def answer(url: str, expression: str) -> Any:
        return url.startswith("https://b") if "visibilityState" in expression else {"cost": "5"}

    async with FakeBrowser(["https://a.example/", "https://b.example/p/q?k=v&l=1,2"], answer) as chrome:
        drive(desktop, chrome)
        assert (await got(desktop, "active_url_from_accessTree"))["value"].startswith("https://b.example")
        parsed = await got(desktop, "active_tab_url_parse", parse_keys=["k", "m"], replace={"k": "kind"})
        assert parsed["value"] == {"m": "", "kind": "v"}
        part = await got(desktop, "url_dashPart", partIndex=-1, needDeleteId=True, returnType="json", key="z")
        assert part["value"] == {"z": "q"}
        found = await got(desktop, "active_tab_html_parse", category="xpath", xpathObject={"/html": "cost"})
        assert found["value"] == {"cost": "5"}
        page = await got(desktop, "pdf_from_url", path="https://c.example/", dest="c.pdf")
        assert page == {"file": "/job/in/0/c.pdf"}


async def test_without_a_browser_getters_give_what_osworlds_give_and_a_step_fails(desktop: Desktop) -> None:
    assert (await got(desktop, "open_tabs_info"))["value"] == []
    assert (await got(desktop, "active_tab_info"))["value"] is None
    website = {"url": "https://a.example/", "infos": [], "backups": ["1"]}
    assert (await got(desktop, "info_from_website", **website))["value"] == ["1"]
    step = {"type": "chrome_open_tabs", "parameters": {"urls_to_open": []}}
    with pytest.raises(SandboxError, match="no browser listens on port 9222"):
        await Setup(create_app).run(desktop, [step], 5.0)


async def test_a_sites_page_that_cannot_be_seen_is_no_score(desktop: Desktop) -> None:
    def answer(url: str, expression: str) -> Any:
        return "setTimeout" not in expression

    async with FakeBrowser([], answer) as chrome:
        drive(desktop, chrome)
        with pytest.raises(JudgeError, match=r"recreation.gov did not show.*hero-search-input"):
            await got(desktop, "gotoRecreationPage_and_get_html_content", **{"class": "c", "order": "2"})


def test_a_shops_url_says_what_it_filters_by() -> None:
    names, values = "Price_discount_range,Sleeve_length", "50_PERCENT_%20off%20%26%20more,Short%20Sleeve"
    found = macys_filters(
        f"https://shop.example/shop/mens-clothing/{names}/{values}?id=1", ["Price_discount_range"]
    )
    right = {"mens_clothing": True, "shirts": None, "short_sleeve": True}
    assert found == {**right, "Price_discount_range": "50_PERCENT_ off & more"}
    assert macys_filters("https://shop.example/x", ["Price_discount_range"])["mens_clothing"] is None


async def test_players_without_a_port_have_no_status(desktop: Desktop) -> None:
    assert await got(desktop, "vlc_playing_info", dest="s.xml") == {"file": None}
    assert VLC_PORT != CDP_PORT


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("https://www.a.example/x/", "http://a.example/x", True),
        ("https://a.example/x?q=1", "https://a.example/x?q=2", False),
        ("a.example", "https://a.example/", True),
        ("https://a.example/%C3%A9", "https://a.example/é", True),
        ("https://a.example/x", "https://b.example/x", False),
    ],
)
def test_urls_of_one_page(one: str, other: str, is_same: bool) -> None:
    assert same_url(one, other) is is_same
