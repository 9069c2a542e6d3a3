"""OSWorld's own client on a leased desktop: /g/{secret}/server/... . The path is the proof; it dies with the lease.

That client repeats any answer that is not 200 up to three times, and again when a connection breaks. So once a call may
have acted the answer is 200 with the failure inside, and the same body within REPEAT_S of a broken reply gets the first result.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import Response

from sandbox_cluster.bodies import Spooled, spooled
from sandbox_cluster.errors import ApiError
from sandbox_cluster.gateway.broker import Broker
from sandbox_cluster.gateway.state import LeaseRecord
from sandbox_cluster.gateway.upstream import Upstream
from sandbox_cluster.relay import raw_tail
from sandbox_cluster.serving import wait_disconnect

REPEAT_S = 15.0
CALL_S = 3660.0
"""More than the desktop's own server gives its longest call (a bash script: an hour), so that the server speaks first."""
_KEPT_HEADERS = ("content-type", "content-disposition")


@dataclass
class _Call:
    """A call that runs, or whose reply did not reach the client."""

    task: asyncio.Task[Response]
    broken_mono: float | None = None


class PassThrough:
    def __init__(self, broker: Broker, upstream: Upstream, max_body_bytes: int) -> None:
        self._broker, self._upstream, self._max_body_bytes = broker, upstream, max_body_bytes
        self._calls: dict[tuple[str, str], _Call] = {}

    def add_routes(self, app: FastAPI) -> None:
        app.add_api_route(
            "/g/{secret}/server/{path:path}",
            self.handle,
            methods=["GET", "POST"],
            response_class=Response,
            include_in_schema=False,
        )

    async def handle(self, request: Request, secret: str, path: str) -> Response:
        """Send the request to the desktop's OSWorld server. Unknown or ended secret: 401."""
        leases = self._broker.leases
        lease = leases.use_secret(secret)
        query = f"?{request.url.query}" if request.url.query else ""
        target = f"{raw_tail(request.scope, 4)}{query}"
        body = await spooled(
            request, self._max_body_bytes, lambda: leases.touch(lease), mark=target.encode() + b"\0"
        )
        with leases.in_flight(leases.use_secret(secret)):
            key = (lease.lease_id, body.digest)
            call = self._known(key) if request.method == "POST" else None
            if call is not None:
                body.close()
                return await self._deliver(request, call, key)
            call = _Call(asyncio.ensure_future(self._send(lease, request, target, body)))
            if request.method == "POST":
                self._calls[key] = call
            return await self._deliver(request, call, key)

    def forget(self, lease_id: str) -> None:
        """The lease has another desktop: what the one before it answered is no answer of this one."""
        self._calls = {key: call for key, call in self._calls.items() if key[0] != lease_id}

    def _known(self, key: tuple[str, str]) -> _Call | None:
        edge = time.monotonic() - REPEAT_S
        for one, call in list(self._calls.items()):
            if call.broken_mono is not None and call.task.done() and call.broken_mono < edge:
                del self._calls[one]
        known = self._calls.get(key)
        return known if known is not None and known.broken_mono is not None else None

    async def _deliver(self, request: Request, call: _Call, key: tuple[str, str]) -> Response:
        leaving = asyncio.ensure_future(wait_disconnect(request))
        try:
            await asyncio.wait({call.task, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not call.task.done():
                call.broken_mono = time.monotonic()
                raise ApiError("gone", "the client left")
            if not leaving.done():
                if self._calls.get(key) is call:
                    del self._calls[key]
            else:
                call.broken_mono = time.monotonic()
            return call.task.result()
        finally:
            leaving.cancel()

    async def _send(self, lease: LeaseRecord, request: Request, target: str, body: Spooled) -> Response:
        """Goes on when the client leaves, but no longer than the lease, which has no sign of life then."""
        host = self._broker.hosts.by_id[lease.host_id].registration
        content_type = request.headers.get("content-type", "")
        headers = {"content-type": content_type} if content_type else {}
        path = f"/v1/leases/{lease.lease_id}/server/{target}"
        try:
            with body:
                reply = await self._upstream.call(host, request.method, path, body, CALL_S, headers)
        except ApiError as error:
            return _failure(error, request.method)
        if reply.status >= 500 and request.method == "POST":
            return _failure(
                ApiError("desktop", reply.content[:2000].decode(errors="replace")), request.method
            )
        kept = {name: reply.headers[name] for name in _KEPT_HEADERS if name in reply.headers}
        return Response(reply.content, reply.status, headers=kept)


def _failure(error: ApiError, method: str) -> Response:
    """A call that did not reach the desktop, or only reads, may be repeated and says 503. One that may have acted says 200."""
    if error.kind == "unavailable" or method == "GET":
        return Response(json.dumps(error.body), 503, media_type="application/json")
    body = {
        "status": "error",
        "message": str(error),
        "output": "",
        "error": str(error),
        "returncode": -1,
        "return_code": -1,
    }
    return Response(json.dumps(body), 200, media_type="application/json")
