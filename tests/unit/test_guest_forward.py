"""A machine's own control server behind ours: it gets each request as it was sent, large bodies as they come."""

from __future__ import annotations

import os
from typing import Any

import httpx
from aiohttp import web

from sandbox_cluster.guest.forward import Forwarder
from sandbox_cluster.providers.base import LINUX


class Machine:
    """As far as the forwarder needs a desktop."""

    platform = LINUX

    def __init__(self, control_url: str) -> None:
        self.control_url = control_url


async def test_a_request_reaches_the_machines_server_as_it_was_sent() -> None:
    seen: list[tuple[str, str, int | None, bytes]] = []

    async def any_call(request: web.Request) -> web.Response:
        length = request.content_length
        seen.append((request.method, request.path_qs, length, await request.read()))
        return web.Response(text="done")

    app = web.Application(client_max_size=8 << 20)
    app.router.add_route("*", "/{path:.*}", any_call)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    machine: Any = Machine(f"http://127.0.0.1:{runner.addresses[0][1]}")
    data = os.urandom(3 << 20)
    transport = httpx.ASGITransport(app=Forwarder(machine))
    async with httpx.AsyncClient(transport=transport, base_url="http://guest") as guest:
        form = {"file_path": "/home/user/a"}
        reply = await guest.post("/setup/upload", data=form, files={"file_data": data})
        assert (reply.status_code, reply.text) == (200, "done")
        assert (await guest.post("/screen_size?x=1")).text == "done"
        assert (await guest.get("/screenshot")).text == "done"
    await runner.cleanup()
    (method, path, length, body), size, shot = seen
    assert (method, path) == ("POST", "/setup/upload") and data in body and length == len(body)
    assert size == ("POST", "/screen_size?x=1", size[2], b"") and not size[2]
    assert shot[0] == "GET" and shot[3] == b""
