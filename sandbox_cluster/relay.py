"""Passing HTTP requests and websockets on, as gateway and host do for Chrome's debugger and VLC.

A desktop's service sees `Host: 127.0.0.1:PORT` and no Origin: Chrome answers nobody else. A slow reader holds back the
other side's writer (one message in flight each way, and what the sockets hold); close codes go through.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from typing import Any

import aiohttp
from fastapi import WebSocket, WebSocketDisconnect
from fastapi.responses import Response
from starlette.types import Scope

from sandbox_cluster.errors import ApiError
from sandbox_cluster.providers.base import CDP_PORT, VLC_PORT
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.serving import error_response
from sandbox_cluster.wire import Reply, read_reply

SERVICES = {"cdp": CDP_PORT, "vlc": VLC_PORT}
AUTHORIZATION = "x-relay-authorization"
"""The client's own Authorization between gateway and host, where the header of that name is the gateway's."""
CALL_S = 60.0
GOING_AWAY, POLICY, INTERNAL = 1001, 1008, 1011
_NOT_PASSED = {
    "host",
    "origin",
    "connection",
    "keep-alive",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "accept-encoding",
    AUTHORIZATION,
    "authorization",
}
_REPLY_HEADERS = ("content-type", "content-disposition", "www-authenticate", "cache-control", "location")
_DEBUGGER_URL = re.compile(r"wss?://[^/\"'\s]+/")
_DEBUGGER_QUERY = re.compile(r"ws=[^/\"'&\s]+/")


def raw_tail(scope: Scope, num_before: int) -> str:
    """The path after its first `num_before` slashes as the client wrote it: decoding it and sending it on would make another
    path of it, or two requests. What no path may hold is escaped."""
    tail = bytes(scope["raw_path"]).split(b"/", num_before)[num_before:]
    return "".join(
        chr(one) if 0x21 <= one <= 0x7E and one not in b"#?" else f"%{one:02X}" for one in b"".join(tail)
    )


def passed(headers: Mapping[str, str]) -> dict[str, str]:
    """Request headers that go through: not those of the connection, nor websocket's own, nor a caller's token."""
    return {
        name: value
        for name, value in headers.items()
        if name.lower() not in _NOT_PASSED and not name.lower().startswith("sec-websocket-")
    }


def to_response(reply: Reply) -> Response:
    """`reply` as it came, without the headers of its connection."""
    kept = {name: reply.headers[name] for name in _REPLY_HEADERS if name in reply.headers}
    return Response(reply.content, reply.status, headers=kept)


def point_back(text: str, base: str) -> str:
    """Chrome's JSON with its websocket addresses under `base`, e.g. "ws://gateway:8700/g/SECRET/cdp"."""
    address = base.partition("://")[2]
    text = _DEBUGGER_URL.sub(lambda _: f"{base}/", text)
    return _DEBUGGER_QUERY.sub(lambda _: f"ws={address}/", text)


class _DesktopConnector(aiohttp.BaseConnector):
    """Connections to one port inside a desktop, whatever host a URL names."""

    def __init__(self, desktop: Desktop, port: int) -> None:
        super().__init__()
        self._desktop, self._port = desktop, port

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        try:
            sock = await self._desktop.connect(self._port)
        except OSError as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        try:
            _, protocol = await asyncio.get_running_loop().create_connection(self._factory, sock=sock)
        except BaseException:
            sock.close()
            raise
        return protocol


@contextlib.asynccontextmanager
async def inside(desktop: Desktop, service: str) -> Any:
    """A client session to a service of the desktop, and the URL it answers to. ApiError `not_found` for another name."""
    if service not in SERVICES:
        raise ApiError("not_found", f"no service {service!r}; have server, {', '.join(SERVICES)}")
    port = SERVICES[service]
    session = aiohttp.ClientSession(
        connector=_DesktopConnector(desktop, port), cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
    )
    async with session:
        yield session, f"http://127.0.0.1:{port}"


async def call_inside(
    desktop: Desktop,
    service: str,
    method: str,
    target: str,
    body: bytes | AsyncIterable[bytes],
    headers: Mapping[str, str],
) -> Reply:
    """One HTTP request to a service of the desktop, sent once. ApiError `unavailable` when nobody listens there.

    body: one that comes in parts needs a content-length among the headers.
    """
    async with inside(desktop, service) as (session, url):
        try:
            limit = aiohttp.ClientTimeout(total=CALL_S)
            async with session.request(
                method, url + target, data=body, headers=headers, timeout=limit, allow_redirects=False
            ) as reply:
                return await read_reply(reply)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(
                "unavailable",
                f"nothing answers at port {SERVICES[service]} of the desktop: {error or 'time-out'}",
            ) from None


async def relay_websocket(
    client: WebSocket,
    connect: Callable[[Iterable[str]], Awaitable[aiohttp.ClientWebSocketResponse]],
    *,
    on_message: Callable[[], object] = lambda: None,
    until: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Join the client to what `connect` (given the asked-for subprotocols) opens, until either side closes.

    `on_message` is called for each of the client's messages. When `until` returns, both are closed as policy (1008).
    A connection that cannot be opened is answered with 503 instead of an upgrade.
    """
    try:
        there = await connect(client.scope.get("subprotocols") or ())
    except (aiohttp.ClientError, TimeoutError, OSError, ApiError) as error:
        failure = (
            error if isinstance(error, ApiError) else ApiError("unavailable", f"no websocket there: {error}")
        )
        await deny(client, failure)
        return
    try:
        await client.accept(there.protocol)
        jobs: dict[asyncio.Future[Any], str] = {
            asyncio.ensure_future(_to_there(client, there, on_message)): "client"
        }
        jobs[asyncio.ensure_future(_to_client(client, there))] = "desktop"
        if until is not None:
            jobs[asyncio.ensure_future(until())] = "lease"
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            first = next(iter(done))
            if jobs[first] == "lease":
                await _close(client, POLICY, "the lease has ended")
            else:
                with contextlib.suppress(WebSocketDisconnect):
                    first.result()
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
    finally:
        await there.close()


async def deny(client: WebSocket, error: ApiError) -> None:
    """Answer a websocket request with an HTTP error instead of an upgrade."""
    await client.send_denial_response(error_response(error))


async def _to_there(
    client: WebSocket, there: aiohttp.ClientWebSocketResponse, on_message: Callable[[], object]
) -> None:
    """Client to desktop, until the client closes; its close code goes on."""
    while True:
        message = await client.receive()
        if message["type"] == "websocket.disconnect":
            await there.close(
                code=sendable(message.get("code")), message=(message.get("reason") or "").encode()
            )
            return
        on_message()
        try:
            if message.get("text") is not None:
                await there.send_str(message["text"])
            else:
                await there.send_bytes(message["bytes"])
        except (aiohttp.ClientError, ConnectionError, OSError):
            await _close(client, INTERNAL, "the desktop's connection was lost")
            return


async def _to_client(client: WebSocket, there: aiohttp.ClientWebSocketResponse) -> None:
    """Desktop to client, until the desktop closes; its close code goes on."""
    while True:
        message = await there.receive()
        if message.type == aiohttp.WSMsgType.TEXT:
            await client.send_text(message.data)
        elif message.type == aiohttp.WSMsgType.BINARY:
            await client.send_bytes(message.data)
        else:
            is_closed = message.type == aiohttp.WSMsgType.CLOSE
            code = sendable(message.data) if is_closed else INTERNAL
            await _close(
                client, code, message.extra or "" if is_closed else "the desktop's connection was lost"
            )
            return


async def _close(client: WebSocket, code: int, reason: str) -> None:
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await client.close(code, reason)


def sendable(code: int | None) -> int:
    """A close code that may be sent: 1005 (none given) is a normal end, 1006 and other reserved ones are a lost peer."""
    if code is None or code == 1005:
        return 1000
    return INTERNAL if code in (1004, 1006, 1015) or not 1000 <= code < 5000 else code
