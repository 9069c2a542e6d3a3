"""Set-up steps that need the desktop's browser: tabs by its debugging port, history by its file."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sandbox_cluster.guest.cdp import browser
from sandbox_cluster.providers.desktop import Desktop

PAGE_TIMEOUT_S = 60.0
"""A tab that has not loaded by then stays open as it is, as in OSWorld."""
WAIT_SHARE = 0.8
"""Of the set-up's time, to wait for a browser: then there is time left to say that none came."""
_CHROME_EPOCH_S = 11_644_473_600
"""Chrome counts from 1601."""
_HISTORY = {
    "update_browse_history": (
        "~/.config/google-chrome/Default/History",
        "AppData\\Local\\Google\\Chrome\\User Data\\Default\\History",
    ),
    "update_browse_history_edge": (
        "~/.config/microsoft-edge/Default/History",
        "AppData\\Local\\Microsoft\\Edge\\User Data\\Default\\History",
    ),
}
_SCHEMA = """
CREATE TABLE meta(key LONGVARCHAR NOT NULL UNIQUE PRIMARY KEY, value LONGVARCHAR);
INSERT INTO meta VALUES ('mmap_status', '-1'), ('version', '70'), ('last_compatible_version', '16');
CREATE TABLE urls(id INTEGER PRIMARY KEY AUTOINCREMENT, url LONGVARCHAR, title LONGVARCHAR, visit_count INTEGER DEFAULT 0 NOT NULL,
    typed_count INTEGER DEFAULT 0 NOT NULL, last_visit_time INTEGER NOT NULL, hidden INTEGER DEFAULT 0 NOT NULL);
CREATE TABLE visits(id INTEGER PRIMARY KEY AUTOINCREMENT, url INTEGER NOT NULL, visit_time INTEGER NOT NULL, from_visit INTEGER,
    external_referrer_url TEXT, transition INTEGER DEFAULT 0 NOT NULL, segment_id INTEGER, visit_duration INTEGER DEFAULT 0 NOT NULL,
    incremented_omnibox_typed_score BOOLEAN DEFAULT FALSE NOT NULL, opener_visit INTEGER, originator_cache_guid TEXT,
    originator_visit_id INTEGER, originator_from_visit INTEGER, originator_opener_visit INTEGER,
    is_known_to_sync BOOLEAN DEFAULT FALSE NOT NULL, consider_for_ntp_most_visited BOOLEAN DEFAULT FALSE NOT NULL,
    visited_link_id INTEGER DEFAULT 0 NOT NULL, app_id TEXT);
CREATE INDEX urls_url_index ON urls (url);
CREATE INDEX visits_url_index ON visits (url);
CREATE INDEX visits_from_index ON visits (from_visit);
CREATE INDEX visits_time_index ON visits (visit_time);
CREATE INDEX visits_originator_id_index ON visits (originator_visit_id);
"""
"""The two tables that a visit is in, as Chromium 156 has them; it makes the others when it starts. An older one takes a newer file
as long as `last_compatible_version` is not above its own."""
_LINK = 805306368
"""Transition of a visit: a followed link, first and last of its chain."""


async def open_tabs(desktop: Desktop, parameters: Mapping[str, Any], left_s: float) -> None:
    """A tab for each URL; the tab that the browser came up with is closed."""
    end = time.monotonic() + left_s
    async with browser(desktop, left_s * WAIT_SHARE) as found:
        first = await found.tabs()
        for url in parameters["urls_to_open"]:
            await found.open(url, max(0.1, min(PAGE_TIMEOUT_S, end - time.monotonic())))
        if parameters["urls_to_open"] and first:
            await found.close(first[0])


async def close_tabs(desktop: Desktop, parameters: Mapping[str, Any], left_s: float) -> None:
    """Close one tab for each URL."""
    async with browser(desktop, left_s * WAIT_SHARE) as found:
        tabs = await found.tabs()
        for url in parameters["urls_to_close"]:
            for tab in tabs:
                if same_url(tab.url, url):
                    await found.close(tab)
                    tabs.remove(tab)
                    break


def same_url(one: str, other: str) -> bool:
    """Whether two URLs name one page: http or https, with www or without, with a last slash or without."""

    def plain(url: str) -> tuple[str, str, str]:
        parts = urlsplit(url if "://" in url else f"https://{url}")
        return (
            parts.netloc.lower().removeprefix("www."),
            unquote(parts.path).rstrip("/"),
            unquote(parts.query),
        )

    return plain(one) == plain(other)


def history_step(kind: str) -> Callable[[Desktop, Mapping[str, Any], float], Awaitable[None]]:
    async def write(desktop: Desktop, parameters: Mapping[str, Any], left_s: float) -> None:
        """Replace the browser's history; the browser must not run yet."""
        linux, windows = _HISTORY[kind]
        data = history_file(parameters["history"], time.time())
        await desktop.put_file(windows if desktop.platform.is_windows else linux, data)

    return write


def history_file(visits: Sequence[Mapping[str, Any]], now_s: float) -> bytes:
    """Chrome's History with one visit each: {"url", "title", "visit_time_from_now_in_seconds"}."""
    with tempfile.TemporaryDirectory(prefix="history-") as folder:
        path = Path(folder) / "History"
        base = sqlite3.connect(path)
        base.executescript(_SCHEMA)
        for number, visit in enumerate(visits, 1):
            moment = int((now_s + _CHROME_EPOCH_S - visit["visit_time_from_now_in_seconds"]) * 1_000_000)
            base.execute(
                "INSERT INTO urls VALUES (?, ?, ?, 1, 0, ?, 0)",
                (number, visit["url"], visit["title"], moment),
            )
            base.execute(
                "INSERT INTO visits (id, url, visit_time, from_visit, transition, segment_id) VALUES (?, ?, ?, 0, ?, 0)",
                (number, number, moment, _LINK),
            )
        base.commit()
        base.close()
        return path.read_bytes()


BROWSER_STEPS: dict[str, Callable[[Desktop, Mapping[str, Any], float], Awaitable[None]]] = {
    "chrome_open_tabs": open_tabs,
    "edge_open_tabs": open_tabs,
    "chrome_close_tabs": close_tabs,
    **{kind: history_step(kind) for kind in _HISTORY},
}
