"""Getters that OSWorld wrote for one site each, and one of them for a page as it is on the day."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any
from urllib.parse import unquote, urlparse

from sandbox_cluster.guest.cdp import Browser, NoBrowserError, Page
from sandbox_cluster.guest.cdp import browser as browser_of
from sandbox_cluster.judge.getter_browser import PAGE_TIMEOUT_S, WAIT_S, active_url, wait_for
from sandbox_cluster.judge.scene import Argument, Scene
from slime_cua.core.errors import JudgeError

_RECREATION = "https://www.recreation.gov/"
_TYPE = """(text => { const box = document.querySelector('input#hero-search-input');
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(box, text);
  box.dispatchEvent(new Event('input', {bubbles: true})); })"""
_OPEN_S = 30.0


async def _recreation(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """Text of an element of a camp's page at recreation.gov, as the site shows it today.

    Where the site cannot be reached, OSWorld compares with "__EVALUATION_FAILED__", which scores 0. Here that is a JudgeError.
    """
    name, order = getter["class"], int(getter.get("order", 0))
    try:
        async with browser_of(scene.desktop, WAIT_S, launch=True) as found:
            page = await _camp(
                found, await found.open(_RECREATION, min(PAGE_TIMEOUT_S, scene.left_s())), scene
            )
            expression = (
                f"document.querySelectorAll({json.dumps('.' + name)})[{order}]?.textContent.trim() ?? null"
            )
            text = await page.evaluate(expression)
    except NoBrowserError as error:
        raise JudgeError(f"recreation.gov did not show what it is to be compared with: {error}") from None
    if not isinstance(text, str):
        raise JudgeError(f"recreation.gov shows no element {order} of class {name!r}")
    return {"value": {"expected": {name: text}}}


async def _camp(found: Browser, page: Page, scene: Scene) -> Page:
    """From the site's first page to the tab that its first search result opens."""
    await wait_for(page, "input#hero-search-input")
    await page.evaluate(f'{_TYPE}("Diamond")')
    await page.evaluate("document.querySelector('button.nav-search-button').click()")
    await wait_for(page, ".search-result-highlight--success")
    known = {tab.target_id for tab in await found.tabs()}
    await page.evaluate("document.querySelector('.search-result-highlight--success').click()")
    end = time.monotonic() + min(_OPEN_S, scene.left_s())
    while not (fresh := [tab for tab in await found.tabs() if tab.target_id not in known]):
        if time.monotonic() > end:
            raise NoBrowserError("its search result opened no tab")
        await asyncio.sleep(0.5)
    camp = await found.page(fresh[0])
    await wait_for(camp, "button.next-available")
    await camp.evaluate("document.querySelector('button.next-available').click()")
    await asyncio.sleep(2.0)
    return camp


async def _macys(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    url = await active_url(scene, getter)
    return {"value": None if url is None else macys_filters(url, getter["parse_keys"])}


def macys_filters(url: str, wanted: list[str]) -> dict[str, Any]:
    """What a shop's URL filters by: .../mens-clothing/Price_discount_range,Sleeve_length/50_PERCENT_ off & more,short-sleeve."""
    path = unquote(urlparse(url).path)
    filters: dict[str, Any] = {"Men_regular_size_t": None, "Price_discount_range": None}
    parts = path.strip("/").split("/")
    for names, values in pairwise(parts):
        if "," in names and "," in values:
            pairs = zip(names.split(","), values.split(","), strict=False)
            filters |= {name.strip(): value.strip() or None for name, value in pairs}
            break
    department, sleeves = str(filters.get("Product_department")), str(filters.get("Sleeve_length"))
    result: dict[str, Any] = {
        "mens_clothing": "mens-clothing" in path or None,
        "shirts": "shirts" in path or department in ("shirts", "Shirts", "Shirt") or None,
        "short_sleeve": "short-sleeve" in path or sleeves == "Short Sleeve" or None,
    }
    for name in wanted:
        if name == "Price_discount_range":
            ranges = [part.strip() for part in str(filters[name]).split("|")]
            is_half = ranges == ["50_PERCENT_ off & more"]
            result[name] = "50_PERCENT_ off & more" if is_half else "not_50_PERCENT_ off & more"
        elif name in filters:
            result[name] = filters[name]
    return result


FUNCTIONS = {
    "gotoRecreationPage_and_get_html_content": _recreation,
    "macys_product_url_parse": _macys,
    "url_path_parse": _macys,
}
