"""Chrome inside a desktop, by its debugging protocol over a connection that the provider gives.

The browser is the desktop's, so what it says is bounded in size and time. Source: Chrome DevTools Protocol 1.3 (Target, Page, Runtime).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from sandbox_cluster.providers.base import CDP_PORT
from sandbox_cluster.providers.desktop import Desktop
from slime_cua.core.errors import SandboxError

CALL_TIMEOUT_S = 15.0
MAX_MESSAGE_BYTES = 64 << 20
IDLE_TIMEOUT_S = 5.0
"""How long a loaded page may go on loading before it is read."""
LAUNCH = ("google-chrome", "--remote-debugging-port=1337")
"""As OSWorld's tasks start it; port 9222 leads there."""
_POLL_S = 0.25


class NoBrowserError(SandboxError):
    """No browser listens, or it does not answer as one. A getter makes of it what OSWorld's does."""


@dataclass(frozen=True)
class Tab:
    target_id: str
    title: str
    url: str


class Browser:
    """One connection to a browser; one caller at a time. NoBrowserError when it goes away or refuses a call."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self._events: list[dict[str, Any]] = []

    async def tabs(self) -> list[Tab]:
        """Pages, in the browser's order."""
        found = (await self.call("Target.getTargets"))["targetInfos"]
        return [
            Tab(one["targetId"], one.get("title", ""), one["url"]) for one in found if one["type"] == "page"
        ]

    async def close(self, tab: Tab) -> None:
        await self.call("Target.closeTarget", {"targetId": tab.target_id})

    async def page(self, tab: Tab) -> Page:
        """A tab to look into."""
        reply = await self.call("Target.attachToTarget", {"targetId": tab.target_id, "flatten": True})
        page = Page(self, tab.target_id, reply["sessionId"])
        await page.call("Page.enable")
        return page

    async def open(self, url: str, timeout_s: float) -> Page:
        """A new tab at `url`, loaded or not after timeout_s (see Page.is_loaded)."""
        target = (await self.call("Target.createTarget", {"url": "about:blank"}))["targetId"]
        page = await self.page(Tab(target, "", "about:blank"))
        await page.go(url, timeout_s)
        return page

    async def call(
        self, method: str, parameters: dict[str, Any] | None = None, session: str = ""
    ) -> dict[str, Any]:
        """One command's result."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters or {}}
        if session:
            request["sessionId"] = session
        number = self._number
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._socket.send(json.dumps(request))
                while (reply := await self._next()).get("id") != number:
                    self._events.append(reply)
        except TimeoutError:
            raise NoBrowserError(f"the browser did not answer {method} in {CALL_TIMEOUT_S:g} s") from None
        if "error" in reply:
            raise NoBrowserError(f"the browser refused {method}: {str(reply['error'].get('message'))[:200]}")
        result = reply.get("result", {})
        return result if isinstance(result, dict) else {}

    async def wait(self, session: str, method: str, timeout_s: float, name: str = "") -> bool:
        """Whether an event of a session came within timeout_s (`name`: of a life cycle event); events before it are dropped."""

        def is_wanted(event: dict[str, Any]) -> bool:
            return (
                event.get("sessionId") == session
                and event.get("method") == method
                and (not name or event.get("params", {}).get("name") == name)
            )

        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    event = self._events.pop(0) if self._events else await self._next()
                    if is_wanted(event):
                        return True
        except TimeoutError:
            return False

    async def _next(self) -> dict[str, Any]:
        try:
            message = json.loads(await self._socket.recv())
        except (WebSocketException, ValueError, OSError) as error:
            raise NoBrowserError(f"the browser went away: {type(error).__name__}") from None
        if not isinstance(message, dict):
            raise NoBrowserError("the browser sent no object")
        return message


class Page:
    """A tab that is attached to."""

    def __init__(self, browser: Browser, target_id: str, session: str) -> None:
        self._browser, self.target_id, self._session = browser, target_id, session
        self.is_loaded = True

    async def call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        return await self._browser.call(method, parameters, self._session)

    async def go(self, url: str, timeout_s: float) -> None:
        """Navigate; `is_loaded` says whether the load ended in time. Then the network gets a while to fall silent."""
        end = time.monotonic() + timeout_s
        await self.call("Page.setLifecycleEventsEnabled", {"enabled": True})
        await self.call("Page.navigate", {"url": url})
        self.is_loaded = await self._browser.wait(self._session, "Page.loadEventFired", timeout_s)
        if self.is_loaded:
            idle_s = max(0.0, min(IDLE_TIMEOUT_S, end - time.monotonic()))
            await self._browser.wait(self._session, "Page.lifecycleEvent", idle_s, "networkIdle")

    async def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression in the page. NoBrowserError when it throws."""
        reply = await self.call(
            "Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True}
        )
        if "exceptionDetails" in reply:
            raise NoBrowserError(f"the page threw: {str(reply['exceptionDetails'].get('text'))[:200]}")
        return reply.get("result", {}).get("value")

    async def content(self) -> dict[str, str]:
        """{"title", "url", "content"}: the page as OSWorld's getters give it."""
        return {
            "title": str(await self.evaluate("document.title")),
            "url": str(await self.evaluate("location.href")),
            "content": str(await self.evaluate("document.documentElement.outerHTML")),
        }

    async def pdf(self) -> bytes:
        """The page, printed."""
        return base64.b64decode((await self.call("Page.printToPDF")).get("data", ""))

    async def close(self) -> None:
        await self._browser.call("Target.closeTarget", {"targetId": self.target_id})


@contextlib.asynccontextmanager
async def browser(desktop: Desktop, wait_s: float, launch: bool = False) -> AsyncIterator[Browser]:
    """The desktop's browser, waited for; `launch`: started when none listens. NoBrowserError after wait_s."""
    path = await _debugger_path(desktop, wait_s, launch)
    try:
        socket = await desktop.connect(CDP_PORT)
        client = connect(
            f"ws://127.0.0.1:{CDP_PORT}{path}",
            sock=socket,
            max_size=MAX_MESSAGE_BYTES,
            compression=None,
            proxy=None,
            open_timeout=CALL_TIMEOUT_S,
            close_timeout=1.0,
        )
        opened = await client
    except (OSError, TimeoutError, WebSocketException) as error:
        raise NoBrowserError(f"the browser does not take a connection: {type(error).__name__}") from None
    try:
        yield Browser(opened)
    finally:
        await opened.close()


async def _debugger_path(desktop: Desktop, wait_s: float, launch: bool) -> str:
    end = time.monotonic() + wait_s
    while True:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                version = json.loads(await _get(desktop, "/json/version"))
            return "/" + str(version["webSocketDebuggerUrl"]).split("/", 3)[3]
        except (OSError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
            if launch:
                launch = False
                with contextlib.suppress(OSError):
                    await desktop.launch(LAUNCH)
            if time.monotonic() >= end:
                raise NoBrowserError(
                    f"no browser listens on port {CDP_PORT} ({type(error).__name__}): start it with "
                    f"--remote-debugging-port and lead the port there"
                ) from None
        await asyncio.sleep(_POLL_S)


async def _get(desktop: Desktop, path: str) -> bytes:
    """Body of a small GET. Chrome insists on HTTP/1.1 and on the loopback address as Host, and keeps the connection open."""
    reader, writer = await asyncio.open_connection(sock=await desktop.connect(CDP_PORT), limit=1 << 20)
    try:
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{CDP_PORT}\r\nConnection: close\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            ),
            -1,
        )
        return await (reader.readexactly(min(length, 1 << 20)) if length >= 0 else reader.read(1 << 20))
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise ConnectionError(str(error)) from None
    finally:
        writer.close()
