"""A browser's debugging port, as far as our client uses it: tabs, navigation, canned values of JavaScript."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response


class FakeBrowser:
    """`async with` it; `port` is where it listens. `answer` gives the value of an expression in the tab at a URL."""

    def __init__(
        self, urls: list[str], answer: Callable[[str, str], Any] = lambda url, expression: None
    ) -> None:
        self.tabs = {f"T{number}": url for number, url in enumerate(urls)}
        self.answer = answer
        self.hosts: list[str] = []
        self.never_load: set[str] = set()
        self.is_silent = False
        self._server: Server | None = None

    async def __aenter__(self) -> FakeBrowser:
        self._server = await serve(self._talk, "127.0.0.1", 0, process_request=self._http)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        if not request.path.startswith("/json/version"):
            return None
        self.hosts.append(request.headers["Host"])
        body = json.dumps({"webSocketDebuggerUrl": "ws://127.0.0.1:9222/devtools/browser/1"})
        return connection.respond(HTTPStatus.OK, body)

    async def _talk(self, socket: ServerConnection) -> None:
        async for message in socket:
            request = json.loads(message)
            if self.is_silent:
                continue
            method, parameters = request["method"], request["params"]
            reply = {
                "id": request["id"],
                "result": self._result(method, parameters, request.get("sessionId", "")),
            }
            await socket.send(json.dumps(reply))
            session = request.get("sessionId")
            if method == "Page.navigate" and parameters["url"] not in self.never_load:
                for event in ("Page.loadEventFired", "Page.lifecycleEvent"):
                    params = {"name": "networkIdle"}
                    await socket.send(json.dumps({"method": event, "sessionId": session, "params": params}))
                    await asyncio.sleep(0)

    def _result(self, method: str, parameters: dict[str, Any], session: str) -> dict[str, Any]:
        if method == "Target.getTargets":
            found = [
                {"targetId": target, "type": "page", "title": f"title of {url}", "url": url}
                for target, url in self.tabs.items()
            ]
            return {"targetInfos": [*found, {"targetId": "W", "type": "worker", "url": "x"}]}
        if method == "Target.createTarget":
            target = f"N{len(self.tabs)}"
            self.tabs[target] = parameters["url"]
            return {"targetId": target}
        if method == "Target.attachToTarget":
            return {"sessionId": parameters["targetId"]}
        if method == "Target.closeTarget":
            del self.tabs[parameters["targetId"]]
        if method == "Page.navigate":
            self.tabs[session] = parameters["url"]
        if method == "Page.printToPDF":
            return {"data": base64.b64encode(b"%PDF " + self.tabs[session].encode()).decode()}
        if method == "Runtime.evaluate":
            return {"result": {"value": self.answer(self.tabs[session], parameters["expression"])}}
        return {}
