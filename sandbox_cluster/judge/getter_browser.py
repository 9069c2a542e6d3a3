"""Getters that ask the browser of the desktop: by its debugging port, or by the accessibility tree.

A browser that the policy closed is no failure of ours: getters give what OSWorld's give then. Otherwise than there, nothing is
tried three times for a minute each, and the active tab is asked of the browser where the desktop has no accessibility tree.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

from sandbox_cluster.guest.cdp import Browser, NoBrowserError, Page, Tab, browser
from sandbox_cluster.judge.scene import Argument, Scene
from sandbox_cluster.providers.desktop import Desktop

WAIT_S = 5.0
"""For a browser that was just started."""
PAGE_TIMEOUT_S = 60.0
SELECTOR_TIMEOUT_MS = 10_000
MAX_HTTP_BYTES = 4 << 20
APPLICATIONS = ["Google Chrome", "Chromium"]
_TEXTS = """(config => {
  const all = css => { try { return [...document.querySelectorAll(css)] } catch (e) { return [] } };
  const text = node => (node.textContent || '').trim();
  const direct = node => [...node.childNodes].filter(n => n.nodeType === 3).map(n => n.textContent.trim()).filter(Boolean);
  const first = xpath => { try { return document.evaluate(xpath, document, null, 9, null).singleNodeValue } catch (e) { return null } };
  const out = {};
  const ranked = (table, texts) => { for (const [name, ranks] of Object.entries(table || {})) {
    const found = texts('.' + name);
    for (const [rank, key] of Object.entries(ranks)) out[key] = found.length > +rank ? found[+rank] : ''; } };
  const others = (found, list) => { if (found.some(t => list.every(i => !i.toLowerCase().includes(t.toLowerCase()))))
    out.is_other_exist = true; else if (!('is_other_exist' in out)) out.is_other_exist = false; };
  const has = (table, texts) => { for (const [name, list] of Object.entries(table || {})) {
    const found = texts('.' + name);
    for (const key of list) if (found.some(t => t.toLowerCase() === key.toLowerCase())) out[key.toLowerCase()] = true;
    others(found, list); } };
  const url = location.href.toLowerCase();
  if (config.category === 'class') {
    ranked(config.class_multiObject, css => all(css).map(text));
    ranked(config.class_multiObject_child, css => all(css).map(direct)[0] || []);
    ranked(config.class_multiObject_only_child, css => all(css).map(n => n.querySelector('h3')).filter(Boolean).map(text));
    for (const [name, list] of Object.entries(config.class_multiObject_search_exist || {})) {
      const found = all('.' + name).map(text);
      for (const item of list) if (item !== 'is_other_exist') out[item] = found.includes(item);
      if (list.includes('is_other_exist')) out.is_other_exist = found.some(t => !list.includes(t)); }
    for (const [name, key] of Object.entries(config.class_singleObject || {})) out[key] = (all('.' + name).map(text)[0]) || '';
  } else if (config.category === 'label') {
    for (const [label, key] of Object.entries(config.labelObject || {})) {
      const holds = n => text(n).toLowerCase().includes(label.toLowerCase());
      const found = all('body *').filter(n => holds(n) && ![...n.children].some(holds));
      out[key] = found.length ? text(found[0]) : ''; }
  } else if (config.category === 'xpath') {
    for (const [xpath, key] of Object.entries(config.xpathObject || {})) { const n = first(xpath); out[key] = n ? text(n) : ''; }
  } else if (config.category === 'input') {
    for (const [xpath, key] of Object.entries(config.inputObject || {})) { const n = first(xpath); out[key] = n ? (n.value || '').trim() : ''; }
  } else if (config.category === 'class&url') {
    has(config.class_multiObject, css => all(css).map(text));
    has(config.class_multiObject_li, css => all(css + ' li.catAllProducts').map(n => n.querySelector('span')).filter(Boolean).map(n => n.innerText.trim()));
    for (const key of config.url_include_expected || []) if (!(key.toLowerCase() in out)) out[key.toLowerCase()] = url.includes(key.toLowerCase());
    for (const [key, name] of Object.entries(config.url_include_expected_multichoice || {})) if (!(name.toLowerCase() in out)) out[name.toLowerCase()] = url.includes(key.toLowerCase());
  }
  return out;
})"""
_WAIT_FOR = """(async (css, ms) => { for (const end = Date.now() + ms; Date.now() < end; await new Promise(r => setTimeout(r, 100)))
  if (document.querySelector(css)) return true; return false })"""


async def tree(scene: Scene) -> str | None:
    """The accessibility tree; None on desktops without one (an empty tree says so)."""
    reply = await scene.ask("GET", "/accessibility")
    body = reply.json() if reply.status_code == 200 else {}
    return None if "reason" in body else body.get("AT")


async def http_body(
    desktop: Desktop, port: int, path: str, user: tuple[str, str], timeout_s: float
) -> bytes | None:
    """Body of a 200 answer of a server inside the desktop; None when there is none."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(sock=await desktop.connect(port))
            try:
                proof = base64.b64encode(":".join(user).encode()).decode()
                writer.write(
                    f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Basic {proof}\r\n"
                    "Connection: close\r\n\r\n".encode()
                )
                parts, size = [], 0
                while size <= MAX_HTTP_BYTES and (part := await reader.read(65536)):
                    parts.append(part)
                    size += len(part)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    return body if head.split(b" ", 2)[1:2] == [b"200"] and size <= MAX_HTTP_BYTES else None


async def active_url(scene: Scene, getter: Mapping[str, Any]) -> str | None:
    """URL in the address bar, with `goto_prefix` ("https://") before it; from the browser without an accessibility tree."""
    text = await tree(scene)
    if text is None:
        return await _visible_url(scene)
    shown = await scene.parse("address_bar", text.encode(), "tree.xml", applications=APPLICATIONS)
    return None if shown is None else f"{getter.get('goto_prefix', 'https://')}{shown}"


async def _visible_url(scene: Scene) -> str | None:
    try:
        async with browser(scene.desktop, WAIT_S) as found:
            for tab in await found.tabs():
                page = await found.page(tab)
                if await page.evaluate("document.visibilityState === 'visible'"):
                    return tab.url
    except NoBrowserError:
        return None
    return None


async def _active_url_argument(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    return {"value": await active_url(scene, getter)}


async def _open_tabs(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    try:
        async with browser(scene.desktop, WAIT_S, launch=True) as found:
            return {"value": [{"title": tab.title, "url": tab.url} for tab in await found.tabs()]}
    except NoBrowserError:
        return {"value": []}


async def _content(scene: Scene, url: str) -> dict[str, str]:
    async with browser(scene.desktop, WAIT_S, launch=True) as found:
        page = await found.open(url, min(PAGE_TIMEOUT_S, scene.left_s()))
        content = await page.content()
        await page.close()
        return content if page.is_loaded else {**content, "title": "Load timeout"}


async def _page_info(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    try:
        return {"value": await _content(scene, getter["url"])}
    except NoBrowserError:
        return {"value": {"title": "Connection failed", "url": getter["url"], "content": ""}}


async def _active_tab_info(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """Title, URL and text of the page at the active tab's URL, loaded afresh, as OSWorld does."""
    url = await active_url(scene, getter)
    try:
        return {"value": None if url is None else await _content(scene, url)}
    except NoBrowserError:
        return {"value": None}


async def _html_parse(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    url = await active_url(scene, getter)
    if url is None:
        return {"value": None}
    try:
        async with browser(scene.desktop, WAIT_S, launch=True) as found:
            tab = _same(await found.tabs(), url)
            if tab is None:
                return {"value": {}}
            page = await found.page(tab)
            return {"value": await page.evaluate(f"{_TEXTS}({json.dumps(dict(getter))})")}
    except NoBrowserError:
        return {"value": {}}


def _same(tabs: list[Tab], url: str) -> Tab | None:
    def plain(text: str) -> str:
        return unquote(text).rstrip("/")

    return next((tab for tab in tabs if plain(tab.url) == plain(url)), None)


async def _url_parse(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    url = await active_url(scene, getter)
    if url is None:
        return {"value": None}
    query = parse_qs(urlparse(url).query)
    found: dict[str, Any] = {key: query.get(key, [""])[0] for key in getter["parse_keys"]}
    for old, new in getter.get("replace", {}).items():
        found[new] = found.pop(old)
    if getter.get("split_list"):
        found = {key: value.split(",") for key, value in found.items()}
    return {"value": found}


async def _dash_part(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    url = await active_url(scene, getter)
    parts = [] if url is None else url.split("/")
    index = int(getter["partIndex"])
    if not -len(parts) <= index < len(parts):
        return {"value": None}
    part = parts[index].split("?")[0] if getter.get("needDeleteId") else parts[index]
    return {"value": {getter["key"]: part} if getter["returnType"] == "json" else part}


async def _pdf(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """The page at a URL, printed; None when the browser cannot, where OSWorld gives a broken file."""
    try:
        async with browser(scene.desktop, WAIT_S, launch=True) as found:
            page = await found.open(getter["path"], min(PAGE_TIMEOUT_S, scene.left_s()))
            data = await page.pdf()
            await page.close()
    except NoBrowserError:
        return {"file": None}
    return scene.file(getter.get("dest") or "page.pdf", data or None)


async def _website(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """Texts or attributes of a site's elements, each in the page as loaded afresh; `backups` when that fails."""
    try:
        async with browser(scene.desktop, WAIT_S, launch=True) as found:
            page = await found.open(getter["url"], min(PAGE_TIMEOUT_S, scene.left_s()))
            values = [await _website_value(found, page, getter["url"], one, scene) for one in getter["infos"]]
            await page.close()
            return {"value": values}
    except NoBrowserError:
        return {"value": getter.get("backups")}


async def _website_value(
    found: Browser, page: Page, url: str, wanted: Mapping[str, Any], scene: Scene
) -> Any:
    if _same([Tab("", "", str(await page.evaluate("location.href")))], url) is None:
        await page.go(url, min(PAGE_TIMEOUT_S, scene.left_s()))
    action, selector = wanted.get("action", "inner_text"), wanted["selector"]
    *clicks, last = selector if isinstance(selector, list) else [selector]
    for css in clicks:
        await wait_for(page, css)
        await page.evaluate(f"document.querySelector({json.dumps(css)}).click()")
        await asyncio.sleep(1.0)
    await wait_for(page, last)
    what = (
        "innerText" if action.endswith("inner_text") else f"getAttribute({json.dumps(wanted['attribute'])})"
    )
    return await page.evaluate(f"document.querySelector({json.dumps(last)}).{what}")


async def wait_for(page: Page, css: str) -> None:
    """Wait until the page has such an element. NoBrowserError when none comes."""
    if not await page.evaluate(f"{_WAIT_FOR}({json.dumps(css)}, {SELECTOR_TIMEOUT_MS})"):
        raise NoBrowserError(f"the page has no {css!r}")


FUNCTIONS = {
    "active_url_from_accessTree": _active_url_argument,
    "open_tabs_info": _open_tabs,
    "page_info": _page_info,
    "active_tab_info": _active_tab_info,
    "active_tab_html_parse": _html_parse,
    "active_tab_url_parse": _url_parse,
    "url_dashPart": _dash_part,
    "pdf_from_url": _pdf,
    "info_from_website": _website,
}
