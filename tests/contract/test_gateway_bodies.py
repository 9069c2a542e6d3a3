"""Bodies at gateway and host: large ones pass, larger ones than configured are refused before anything was done, and a body
or a reply that never ends holds neither memory nor a lease."""

from __future__ import annotations

import asyncio
import http.client
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import httpx
import pytest
from aiohttp import web
from starlette.requests import Request

from sandbox_cluster.bodies import MEMORY_BYTES, spooled
from sandbox_cluster.entry import DEFAULT_MAX_BODY_MB
from sandbox_cluster.gateway import passthrough
from sandbox_cluster.gateway.__main__ import parse
from sandbox_cluster.guest import forward, server
from sandbox_cluster.providers.fake import EVENT_LOG
from sandbox_cluster.wire import ReplyTooLong, read_reply
from slime_cua.config.sandbox import SandboxConfig
from tests.contract.gateway_rig import Rig, acquire_body, eventually

LIMIT = "sandbox.max_body_mb = 1 MiB"


async def chunked(num_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(num_bytes >> 16):
        yield b"x" * (1 << 16)


CALLS = [
    ("POST", "/v1/leases/{lease}/step"),
    ("POST", "/v1/leases/{lease}/setup"),
    ("POST", "/v1/leases/{lease}/evaluate"),
    ("GET", "/v1/leases/{lease}/screenshot"),
    ("POST", "/v1/leases/{lease}/reset"),
    ("POST", "/g/{secret}/server/execute"),
    ("GET", "/g/{secret}/server/screenshot"),
    ("PUT", "/g/{secret}/cdp/json/new"),
    ("POST", "/g/{secret}/vlc/requests"),
]


async def test_a_larger_body_than_configured_is_413_with_the_key_and_nothing_is_done(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_body_mb=1)
    async with rig.gateway(), rig.host(spares=0) as machine, rig.http() as http:
        lease = (await http.post("/v1/leases", json=acquire_body())).json()
        for method, path in CALLS:
            target = path.format(lease=lease["lease_id"], secret=lease["secret"])
            for content in (bytes(2 << 20), chunked(2 << 20)):
                reply = await http.request(method, target, content=content, timeout=60)
                assert reply.status_code == 413 and LIMIT in reply.text, (path, reply.text)
        [driver] = machine.provider.drivers.values()
        assert driver.is_alive and driver.files == {EVENT_LOG: b""}
        assert (await http.get(f"/v1/leases/{lease['lease_id']}/screenshot")).status_code == 200


async def test_an_upload_of_a_large_file_arrives_whole(tmp_path: Path) -> None:
    data = os.urandom(8 << 20)
    rig = Rig(tmp_path, max_body_mb=9)
    async with rig.gateway(), rig.host() as machine, rig.client() as client, rig.http("") as osworld:
        async with client.lease(key="k") as sandbox:
            reply = await osworld.post(
                f"{sandbox.osworld_path}/setup/upload",
                data={"file_path": "/home/user/large"},
                files={"file_data": data},
                timeout=60,
            )
            assert reply.status_code == 200, reply.text
            assert any(one.files.get("/home/user/large") == data for one in machine.provider.drivers.values())


async def test_who_still_sends_hears_the_refusal_and_not_a_broken_connection(tmp_path: Path) -> None:
    """OSWorld's client sends the whole file before it reads, from a blocking socket."""

    def send(url: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        connection.request("POST", path, body=bytes(24 << 20))
        reply = connection.getresponse()
        return reply.status, reply.read()

    rig = Rig(tmp_path, max_body_mb=1)
    async with rig.gateway(), rig.host(), rig.client() as client, client.lease(key="k") as sandbox:
        path = f"{sandbox.osworld_path}/setup/upload"
        status, text = await asyncio.to_thread(send, rig.url, path)
        assert status == 413 and LIMIT in text.decode()


async def test_a_large_body_is_kept_in_a_file_and_a_small_one_in_memory() -> None:
    async def body_of(num_bytes: int) -> bool:
        parts = iter([b"x" * num_bytes, b""])

        async def receive() -> dict[str, object]:
            part = next(parts)
            return {"type": "http.request", "body": part, "more_body": bool(part)}

        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        with await spooled(request, 1 << 30) as body:
            content = body.content()
            if isinstance(content, bytes):
                assert content == b"x" * num_bytes
                return True
            assert b"".join([part async for part in content]) == b"x" * num_bytes
            return False

    assert await body_of(MEMORY_BYTES) and not await body_of(MEMORY_BYTES + 1)


async def test_a_host_reads_nothing_of_who_has_no_token_sends_too_much_or_does_not_say_how_much(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, max_body_mb=1)
    async with rig.gateway() as gateway, rig.host():
        host = gateway.broker.hosts.by_id["h1"].registration
        right = f"authorization: Bearer {host.call_token}\r\n"
        for headers, status in (
            ("content-length: 1000000000\r\n", b"401"),
            ("authorization: Bearer wrong\r\ncontent-length: 10\r\n", b"401"),
            (right + "content-length: 1000000000\r\n", b"413"),
            (right + "transfer-encoding: chunked\r\n", b"400"),
        ):
            for path in ("step", "server/execute", "port/cdp/json"):
                head = f"POST /v1/leases/l/{path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n"
                address, port = host.url.removeprefix("http://").split(":")
                reader, writer = await asyncio.open_connection(address, int(port))
                writer.write(head.encode())
                async with asyncio.timeout(20):
                    assert (await reader.readline()).split()[1] == status, (headers, path)
                writer.close()


@pytest.mark.parametrize("path", ["/v1/leases/{lease}/execute", "/g/{secret}/server/setup/upload"])
async def test_an_upload_that_stands_still_does_not_keep_its_lease(tmp_path: Path, path: str) -> None:
    rig = Rig(tmp_path)
    async with rig.gateway() as gateway, rig.host(), rig.http() as http:
        lease = (await http.post("/v1/leases", json=acquire_body(ttl_s=1.0))).json()
        address, port = rig.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(address, int(port))
        target = path.format(lease=lease["lease_id"], secret=lease["secret"])
        head = f"POST {target} HTTP/1.1\r\nhost: x\r\nauthorization: {http.headers['authorization']}\r\n"
        writer.write(f"{head}content-length: 100\r\n\r\nhalf of it".encode())
        record = gateway.broker.leases.by_id[lease["lease_id"]]
        await eventually(lambda: record.state in ("ending", "ended"), 30.0)
        assert "expired" in record.reason
        writer.close()


async def test_a_client_that_left_its_hanging_call_does_not_keep_its_lease(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.gateway() as gateway, rig.host() as machine, rig.http() as http:
        lease = (await http.post("/v1/leases", json=acquire_body(ttl_s=1.0))).json()
        machine.provider.faults.latency_s = 120.0
        for method, path in (("POST", "execute"), ("GET", "screenshot")):
            with pytest.raises(httpx.ReadTimeout):
                await http.request(
                    method,
                    f"/g/{lease['secret']}/server/{path}",
                    content=b'{"command": "true", "shell": true}',
                    timeout=httpx.Timeout(60, read=0.4),
                )
        record = gateway.broker.leases.by_id[lease["lease_id"]]
        await eventually(lambda: record.state in ("ending", "ended"), 30.0)
        assert "expired" in record.reason
        machine.provider.faults.latency_s = 0.0


async def test_a_reply_without_end_is_not_kept() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        while True:
            await reply.write(bytes(1 << 16))

    app = web.Application()
    app.router.add_get("/", endless)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/") as reply:
            with pytest.raises(ReplyTooLong, match="more than 1 MiB"):
                await read_reply(reply, 1 << 20)
    await runner.cleanup()


def test_pass_through_waits_longer_than_the_server_below_it_may_work() -> None:
    longest_s = max(server.MAX_BASH_TIMEOUT_S, 2 * server.EXECUTE_TIMEOUT_S, 1800.0)
    assert longest_s < forward.CALL_S < passthrough.CALL_S


def test_gateway_and_config_have_the_same_limit_when_none_is_given() -> None:
    assert SandboxConfig().max_body_mb == DEFAULT_MAX_BODY_MB == parse(["--state", "x"]).max_body_mb
