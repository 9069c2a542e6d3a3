"""Chrome's debugger and VLC of a leased desktop: /g/{secret}/cdp/... and /g/{secret}/vlc/..., HTTP and websockets.

The path is the proof, as for the guest endpoints. Addresses that Chrome gives out in /json point back here.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import Response

from sandbox_cluster import relay
from sandbox_cluster.api import HostRegistration
from sandbox_cluster.bodies import spooled
from sandbox_cluster.errors import ApiError
from sandbox_cluster.gateway.broker import Broker
from sandbox_cluster.gateway.state import LeaseRecord
from sandbox_cluster.gateway.upstream import Upstream

ENDED_POLL_S = 0.3
_METHODS = ["GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS"]


class Services:
    def __init__(self, broker: Broker, upstream: Upstream, max_body_bytes: int) -> None:
        self._broker, self._upstream, self._max_body_bytes = broker, upstream, max_body_bytes

    def add_routes(self, app: FastAPI) -> None:
        for service in relay.SERVICES:
            path = f"/g/{{secret}}/{service}/{{path:path}}"
            app.add_api_route(
                path,
                self._handler(service),
                methods=_METHODS,
                response_class=Response,
                include_in_schema=False,
            )
            app.add_api_websocket_route(path, self._joiner(service))

    def _handler(self, service: str):  # type: ignore[no-untyped-def]
        async def handle(request: Request, secret: str, path: str) -> Response:
            lease = self._broker.leases.use_secret(secret)
            headers = relay.passed(request.headers)
            if "authorization" in request.headers:
                headers[relay.AUTHORIZATION] = request.headers["authorization"]
            target = _target(lease, service, relay.raw_tail(request.scope, 4), request.url.query)
            leases = self._broker.leases
            with await spooled(request, self._max_body_bytes, lambda: leases.touch(lease)) as body:
                with leases.in_flight(leases.use_secret(secret)):
                    reply = await self._upstream.call(
                        self._host(lease), request.method, target, body, relay.CALL_S + 5.0, headers
                    )
            response = relay.to_response(reply)
            if service == "cdp" and path.startswith("json") and reply.status == 200:
                scheme = "wss" if request.url.scheme == "https" else "ws"
                base = f"{scheme}://{request.headers.get('host', request.url.netloc)}/g/{secret}/cdp"
                text = relay.point_back(reply.content.decode(errors="replace"), base)
                kind = reply.headers.get("content-type", "application/json")
                response = Response(text, 200, media_type=kind)
            return response

        return handle

    def _joiner(self, service: str):  # type: ignore[no-untyped-def]
        async def join(websocket: WebSocket, secret: str, path: str) -> None:
            leases = self._broker.leases
            try:
                lease = leases.use_secret(secret)
            except ApiError as error:
                await relay.deny(websocket, error)
                return

            async def ended() -> None:
                while lease.state == "live":  # noqa: ASYNC110 -- a lease ends in many ways
                    await asyncio.sleep(ENDED_POLL_S)

            target = _target(lease, service, relay.raw_tail(websocket.scope, 4), websocket.url.query)
            headers = relay.passed(websocket.headers)
            await relay.relay_websocket(
                websocket,
                lambda protocols: self._upstream.websocket(self._host(lease), target, headers, protocols),
                on_message=lambda: leases.touch(lease),
                until=ended,
            )

        return join

    def _host(self, lease: LeaseRecord) -> HostRegistration:
        return self._broker.hosts.by_id[lease.host_id].registration


def _target(lease: LeaseRecord, service: str, path: str, query: str) -> str:
    target = f"/v1/leases/{lease.lease_id}/port/{service}/{path}"
    return f"{target}?{query}" if query else target
