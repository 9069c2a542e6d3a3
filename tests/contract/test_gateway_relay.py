"""Chrome's debugger and VLC under the lease secret: HTTP with addresses that point back, websockets both ways."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sandbox_cluster.relay import point_back, sendable
from tests.contract.gateway_rig import Machine, Rig, eventually

PORT = 9222


@dataclass
class Chrome:
    """A debugger with Chrome's manners: it answers only `Host: ADDRESS`, and builds its addresses from that header."""

    port: int = 0
    hosts: list[str] = field(default_factory=list)
    close_codes: list[int | None] = field(default_factory=list)
    num_sent: int = 0
    is_deaf: bool = False
    going: asyncio.Event = field(default_factory=asyncio.Event)

    async def version(self, request: web.Request) -> web.Response:
        host = request.headers["host"]
        self.hosts.append(host)
        if not host.startswith("127.0.0.1"):
            return web.Response(
                status=500, text="Host header is specified and is not an IP address or localhost."
            )
        frontend = f"/devtools/inspector.html?ws={host}/devtools/page/1"
        body = {"webSocketDebuggerUrl": f"ws://{host}/devtools/browser/1", "devtoolsFrontendUrl": frontend}
        return web.json_response(body)

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        if "origin" in request.headers:
            raise web.HTTPForbidden
        socket = web.WebSocketResponse(max_msg_size=64 << 20, protocols=("json",))
        await socket.prepare(request)
        if self.is_deaf:
            await self.going.wait()
        async for message in socket:
            if message.data == "flood":
                while not self.going.is_set():
                    await socket.send_bytes(bytes(1 << 20))
                    self.num_sent += 1
            elif message.data == "close":
                await socket.close(code=4321, message=b"so it is")
            elif message.data == "drop":
                assert request.transport
                request.transport.abort()
            elif message.type == aiohttp.WSMsgType.TEXT:
                await socket.send_str(message.data + "!")
            else:
                await socket.send_bytes(message.data)
        self.close_codes.append(socket.close_code)
        return socket

    async def vlc(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != aiohttp.BasicAuth("", "password").encode():
            return web.Response(status=401, headers={"www-authenticate": 'Basic realm="VLC"'})
        return web.Response(text=f"<root>{request.query_string}</root>", content_type="text/xml")


@contextlib.asynccontextmanager
async def chrome() -> AsyncIterator[Chrome]:
    made = Chrome()
    app = web.Application()
    app.router.add_get("/json/version", made.version)
    app.router.add_get("/devtools/browser/1", made.socket)
    app.router.add_get("/requests/status.xml", made.vlc)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.port = runner.addresses[0][1]
    try:
        yield made
    finally:
        made.going.set()
        await runner.cleanup()


@dataclass
class Leased:
    chrome: Chrome
    session: aiohttp.ClientSession
    http: str
    """http://GATEWAY/g/SECRET."""
    secret: str

    @property
    def debugger(self) -> str:
        return self.http.replace("http", "ws", 1) + "/cdp/devtools/browser/1"

    @contextlib.asynccontextmanager
    async def socket(self, **options: Any) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        async with self.session.ws_connect(self.debugger, max_msg_size=64 << 20, **options) as socket:
            yield socket


def open_ports(machine: Machine, port: int) -> None:
    for driver in machine.provider.drivers.values():
        driver.ports.update({PORT: port, 8080: port})


@pytest.fixture
async def leased(tmp_path: Path) -> AsyncIterator[Leased]:
    rig = Rig(tmp_path)
    async with chrome() as made, rig.gateway(), rig.host() as machine, rig.client() as client:
        async with client.lease(key="k") as sandbox, aiohttp.ClientSession() as session:
            open_ports(machine, made.port)
            base = f"{rig.url}/g/{sandbox.lease.secret}"
            yield Leased(made, session, base, sandbox.lease.secret)


async def test_chromes_addresses_point_back_and_it_is_asked_by_ip(leased: Leased) -> None:
    async with leased.session.get(f"{leased.http}/cdp/json/version/".rstrip("/")) as reply:
        body = await reply.json()
    assert body["webSocketDebuggerUrl"] == leased.debugger
    assert leased.debugger.partition("://")[2] not in body["devtoolsFrontendUrl"]
    assert body["devtoolsFrontendUrl"].endswith(f"ws={leased.http.partition('://')[2]}/cdp/devtools/page/1")
    assert leased.chrome.hosts == [f"127.0.0.1:{PORT}"]


async def test_messages_go_both_ways_as_they_are(leased: Leased) -> None:
    async with leased.socket(origin="http://elsewhere", protocols=("json",)) as socket:
        assert socket.protocol == "json"
        await socket.send_str("é")
        assert await socket.receive_str() == "é!"
        data = bytes(range(256)) * 80_000
        await socket.send_bytes(data)
        assert await socket.receive_bytes() == data


async def test_the_desktops_close_code_reaches_the_client(leased: Leased) -> None:
    async with leased.socket() as socket:
        await socket.send_str("close")
        message = await socket.receive()
        assert (message.type, message.data, message.extra) == (aiohttp.WSMsgType.CLOSE, 4321, "so it is")


async def test_the_clients_close_code_reaches_the_desktop(leased: Leased) -> None:
    async with leased.socket() as socket:
        await socket.send_str("x")
        await socket.receive_str()
        await socket.close(code=4002)
    await eventually(lambda: leased.chrome.close_codes == [4002])


async def test_a_lost_connection_inside_is_a_close_with_a_reason(leased: Leased) -> None:
    async with leased.socket() as socket:
        await socket.send_str("drop")
        message = await socket.receive()
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1011)


async def test_a_client_that_does_not_read_holds_the_desktop_back(leased: Leased) -> None:
    async with leased.socket() as socket:
        await socket.send_str("flood")
        before = -1
        while before != leased.chrome.num_sent:
            before = leased.chrome.num_sent
            await asyncio.sleep(1.0)
        assert 0 < leased.chrome.num_sent < 40
        for _ in range(60):
            assert len(await socket.receive_bytes()) == 1 << 20
        leased.chrome.going.set()


async def test_a_desktop_that_does_not_read_holds_the_client_back(leased: Leased) -> None:
    leased.chrome.is_deaf = True
    num_sent = 0

    async def send(socket: aiohttp.ClientWebSocketResponse) -> None:
        nonlocal num_sent
        for _ in range(200):
            await socket.send_bytes(bytes(1 << 20))
            num_sent += 1

    async with leased.socket() as socket:
        sending = asyncio.ensure_future(send(socket))
        before = -1
        while before != num_sent:
            before = num_sent
            await asyncio.sleep(1.0)
        assert 0 < num_sent < 40
        leased.chrome.going.set()
        for _ in range(200):
            assert len(await socket.receive_bytes()) == 1 << 20
        await sending


async def test_an_unknown_secret_is_401_for_both(leased: Leased) -> None:
    wrong = leased.http.replace(leased.secret, "guess")
    async with leased.session.get(f"{wrong}/cdp/json/version") as reply:
        assert reply.status == 401
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await leased.session.ws_connect(leased.debugger.replace(leased.secret, "guess"))
    assert refused.value.status == 401


async def test_a_service_that_is_not_there_is_503_with_a_sentence(leased: Leased) -> None:
    leased.chrome.going.set()
    async with leased.session.get(f"{leased.http}/vlc/requests/none.xml") as reply:
        assert reply.status == 404
    async with leased.session.get(f"{leased.http}/ftp/x") as reply:
        assert reply.status == 404


async def test_nobody_listening_is_503(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.gateway(), rig.host(), rig.client() as client, client.lease(key="k") as sandbox:
        async with aiohttp.ClientSession() as session:
            base = f"{rig.url}/g/{sandbox.lease.secret}"
            async with session.get(f"{base}/cdp/json/version") as reply:
                body = await reply.json()
                assert reply.status == 503 and "port 9222 of the desktop" in body["error"]["message"]
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect(f"{base}/cdp/devtools/browser/1")
            assert refused.value.status == 503


async def test_vlcs_own_password_goes_through(leased: Leased) -> None:
    url = f"{leased.http}/vlc/requests/status.xml?command=pl_pause"
    async with leased.session.get(url) as reply:
        assert reply.status == 401 and "VLC" in reply.headers["www-authenticate"]
    async with leased.session.get(url, auth=aiohttp.BasicAuth("", "password")) as reply:
        assert await reply.text() == "<root>command=pl_pause</root>"


async def test_the_end_of_a_lease_closes_its_websockets_and_no_log_has_the_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    rig = Rig(tmp_path)
    async with chrome() as made, rig.gateway(), rig.host() as machine, rig.client() as client:
        async with aiohttp.ClientSession() as session:
            async with client.lease(key="k") as sandbox:
                open_ports(machine, made.port)
                secret = sandbox.lease.secret
                address = f"{rig.url}/g/{secret}/cdp/devtools/browser/1"
                socket = await session.ws_connect(address)
                await socket.send_str("x")
                await socket.receive_str()
            message = await asyncio.wait_for(socket.receive(), 10)
            assert message.type == aiohttp.WSMsgType.CLOSE and message.data in (1008, 1011)
            await socket.close()
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect(address)
            assert refused.value.status == 401
    ours = [r for r in caplog.records if r.name.startswith(("sandbox_cluster", "uvicorn"))]
    levels = {record.name: record.levelname for record in ours}
    assert ours and not [
        json.dumps(str(r.__dict__)) for r in ours if secret in str(r.__dict__) and r.levelno > 10
    ], levels


@pytest.mark.parametrize(
    ("code", "sent"), [(None, 1000), (1005, 1000), (1006, 1011), (1001, 1001), (4999, 4999), (7, 1011)]
)
def test_only_codes_that_may_be_sent_are_sent(code: int | None, sent: int) -> None:
    assert sendable(code) == sent


def test_other_text_is_left_alone() -> None:
    assert (
        point_back('{"url": "https://a/b", "x": "news=1"}', "ws://g/cdp")
        == '{"url": "https://a/b", "x": "news=1"}'
    )
