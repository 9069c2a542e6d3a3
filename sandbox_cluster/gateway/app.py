"""The gateway's HTTP face. Bodies of calls on a lease go through as bytes: the host checks them, the gateway only routes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel

from sandbox_cluster import api
from sandbox_cluster.bodies import parsed, spooled
from sandbox_cluster.deadlines import DEADLINE_HEADER, given
from sandbox_cluster.entry import DEFAULT_MAX_BODY_MB
from sandbox_cluster.errors import ApiError
from sandbox_cluster.gateway.broker import Broker
from sandbox_cluster.gateway.metrics import GatewayMetrics
from sandbox_cluster.gateway.passthrough import PassThrough
from sandbox_cluster.gateway.services import Services
from sandbox_cluster.gateway.state import LeaseRecord, State
from sandbox_cluster.gateway.upstream import Upstream
from sandbox_cluster.serving import LeaseRoute, Tokens, event, install_errors, wait_disconnect

MAX_TALK_BYTES = 1 << 20
"""Of what asks for a lease, or what a host says of itself."""
_CALLS: dict[str, tuple[str, type[BaseModel] | None, type[BaseModel] | None, float]] = {
    "step": ("POST", api.StepRequest, api.StepReply, 30.0),
    "execute": ("POST", api.ExecuteRequest, api.ExecuteReply, 60.0),
    "setup": ("POST", api.SetupRequest, api.SetupReply, 150.0),
    "evaluate": ("POST", api.EvaluateRequest, api.EvaluateReply, 90.0),
    "screenshot": ("GET", None, None, 30.0),
    "file": ("GET", None, None, 60.0),
}
"""Call -> method, body, reply, seconds when the client names no deadline. Routes are tried in this order: frequent first."""


@dataclass
class Gateway:
    """What the routes share."""

    state: State
    upstream: Upstream
    metrics: GatewayMetrics
    broker: Broker
    clients: Tokens
    hosts: Tokens
    max_body_bytes: int

    async def forward(self, lease: LeaseRecord, call: str, request: Request, default_s: float) -> Response:
        """Send the call to the lease's host, once, and give its answer back as it is."""
        timeout_s = given(request.headers.get(DEADLINE_HEADER), default_s)
        host = self.broker.hosts.by_id[lease.host_id].registration
        query = f"?{request.url.query}" if request.url.query else ""
        started = time.monotonic()
        outcome = "error"
        try:
            leases = self.broker.leases
            with await spooled(request, self.max_body_bytes, lambda: leases.touch(lease)) as body:
                with leases.in_flight(leases.use(lease.lease_id, lease.principal)):
                    reply = await self.upstream.call(
                        host, request.method, f"/v1/leases/{lease.lease_id}/{call}{query}", body, timeout_s
                    )
            outcome = str(reply.status)
        except ApiError as error:
            outcome = error.kind
            raise
        finally:
            self.metrics.call_seconds.labels(call=call, outcome=outcome).observe(time.monotonic() - started)
        if reply.status >= 400:
            ids = {"lease": lease.lease_id, "task": lease.task_id, "episode": lease.episode_id}
            event("call_failed", call=call, **ids, status=reply.status)
        if reply.status == 404 and lease.state != "live":
            raise ApiError("gone", f"lease {lease.lease_id} has ended: {lease.reason}")
        return Response(
            reply.content, reply.status, media_type=reply.headers.get("content-type", "application/json")
        )


def create_app(
    state: State,
    clients: Tokens,
    hosts: Tokens,
    *,
    host_timeout_s: float = 10.0,
    max_body_mb: int = DEFAULT_MAX_BODY_MB,
) -> FastAPI:
    """The gateway over `state`; it closes `state` when it ends."""
    max_body_bytes = max_body_mb << 20
    metrics, upstream = GatewayMetrics(), Upstream()
    broker = Broker(state, upstream, metrics, host_timeout_s=host_timeout_s)
    gateway = Gateway(state, upstream, metrics, broker, clients, hosts, max_body_bytes)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        broker.start()
        try:
            yield
        finally:
            await broker.close()
            await upstream.close()
            state.close()

    app = FastAPI(title="slime_cua sandbox gateway", version="1", lifespan=life, redoc_url=None)
    app.state.gateway = gateway
    install_errors(app)
    _call_routes(app, gateway)
    pass_through = PassThrough(broker, upstream, max_body_bytes)
    _lease_routes(app, gateway, pass_through)
    _service_routes(app, gateway)
    _host_routes(app, gateway)
    pass_through.add_routes(app)
    Services(broker, upstream, max_body_bytes).add_routes(app)
    return app


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    """The body of a route that reads it itself, for the OpenAPI page."""
    content = {"application/json": {"schema": body.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def _service_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok", "num_hosts": len(gateway.broker.hosts.by_id)}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        gateway.clients.principal(request)
        gateway.metrics.observe(gateway.broker.hosts, gateway.broker.leases.by_id)
        return Response(gateway.metrics.render(), media_type="text/plain; version=0.0.4")


def _lease_routes(app: FastAPI, gateway: Gateway, pass_through: PassThrough) -> None:
    broker, leases = gateway.broker, gateway.broker.leases

    @app.post("/v1/leases", response_model=api.Lease, openapi_extra=_takes(api.AcquireRequest))
    async def acquire(request: Request) -> api.Lease:
        principal = gateway.clients.principal(request)
        body = await parsed(request, api.AcquireRequest, MAX_TALK_BYTES)
        lease = await broker.acquire(principal, body, lambda: wait_disconnect(request))
        return leases.body(lease)

    @app.get("/v1/leases", response_model=list[api.LeaseView])
    async def list_leases(request: Request) -> list[api.LeaseView]:
        return leases.views(gateway.clients.principal(request))

    @app.post("/v1/leases/{lease_id}/heartbeat", response_model=api.Lease)
    async def heartbeat(request: Request, lease_id: str) -> api.Lease:
        return leases.body(leases.use(lease_id, gateway.clients.principal(request)))

    @app.delete("/v1/leases/{lease_id}", status_code=204)
    async def release(request: Request, lease_id: str) -> Response:
        broker.release(lease_id, gateway.clients.principal(request))
        return Response(status_code=204)

    @app.post("/v1/leases/{lease_id}/reset", response_model=api.Lease)
    async def reset(request: Request, lease_id: str) -> Any:
        lease = leases.use(lease_id, gateway.clients.principal(request))
        reply = await gateway.forward(lease, "reset", request, 90.0)
        if reply.status_code != 200:
            return reply
        pass_through.forget(lease_id)
        return leases.body(lease)


def _call_routes(app: FastAPI, gateway: Gateway) -> None:
    def add(
        name: str, method: str, body: type[BaseModel] | None, reply: type[BaseModel] | None, default_s: float
    ) -> None:
        async def call(request: Request, lease_id: str) -> Response:
            lease = gateway.broker.leases.use(lease_id, gateway.clients.principal(request))
            return await gateway.forward(lease, name, request, default_s)

        app.router.add_api_route(
            f"/v1/leases/{{lease_id}}/{name}",
            call,
            methods=[method],
            name=name,
            responses={200: {"model": reply}} if reply else None,
            response_class=Response,
            openapi_extra=_takes(body) if body else None,
            route_class_override=LeaseRoute,
        )

    for name, (method, body, reply, default_s) in _CALLS.items():
        add(name, method, body, reply, default_s)


def _host_routes(app: FastAPI, gateway: Gateway) -> None:
    broker = gateway.broker

    @app.get("/v1/hosts", response_model=list[api.HostView])
    async def hosts(request: Request) -> list[api.HostView]:
        gateway.clients.principal(request)
        return [host.view() for host in broker.hosts.by_id.values()]

    @app.post("/v1/hosts/{host_id}/drain", response_model=api.HostView)
    async def drain(request: Request, host_id: str) -> api.HostView:
        gateway.clients.principal(request)
        return broker.hosts.drain(host_id).view()

    @app.post("/v1/hosts", status_code=204, openapi_extra=_takes(api.HostRegistration))
    async def register(request: Request) -> Response:
        gateway.hosts.principal(request)
        broker.register(await parsed(request, api.HostRegistration, MAX_TALK_BYTES))
        return Response(status_code=204)

    @app.post(
        "/v1/hosts/{host_id}/beat", response_model=api.HostBeatReply, openapi_extra=_takes(api.HostBeat)
    )
    async def beat(request: Request, host_id: str) -> api.HostBeatReply:
        gateway.hosts.principal(request)
        return broker.beat(host_id, await parsed(request, api.HostBeat, MAX_TALK_BYTES))
