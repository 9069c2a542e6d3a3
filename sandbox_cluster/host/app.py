"""The host agent's HTTP face, for its gateway only."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sandbox_cluster import api, relay
from sandbox_cluster.bodies import Gate, declared_bytes, parsed
from sandbox_cluster.deadlines import DEADLINE_HEADER, given, tighter
from sandbox_cluster.errors import ApiError, to_api
from sandbox_cluster.host.bindings import Bindings
from sandbox_cluster.host.work import Work
from sandbox_cluster.serving import LeaseRoute, Tokens, error_response, install_errors
from sandbox_cluster.wire import open_websocket

_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "query_string", "headers", "client", "server")


def create_app(bindings: Bindings, work: Work, tokens: Tokens, max_body_bytes: int) -> FastAPI:
    """Routes of one host agent; all but /healthz are for who has a token."""
    app = FastAPI(
        title="slime_cua sandbox host", version="1", docs_url=None, redoc_url=None, openapi_url=None
    )
    install_errors(app)
    app.add_middleware(Gate, tokens=tokens, most_bytes=max_body_bytes, open_paths=frozenset({"/healthz"}))

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok", "num_leases": len(bindings.lease_ids)}

    @app.put("/v1/leases/{lease_id}", response_model=api.BindReply)
    async def bind(request: Request, lease_id: str, body: api.BindRequest) -> api.BindReply:
        return await bindings.bind(lease_id, body)

    @app.delete("/v1/leases/{lease_id}", status_code=204)
    async def unbind(request: Request, lease_id: str) -> Response:
        bindings.unbind(lease_id)
        return Response(status_code=204)

    _action_routes(app, bindings, max_body_bytes)
    _work_routes(app, bindings, work)
    guest = _PassThrough(bindings, work)
    app.router.routes.append(Route("/v1/leases/{lease_id}/server/{path:path}", guest))
    _port_routes(app, bindings, tokens)
    return app


def _deadline_s(request: Request, default_s: float) -> float:
    return tighter(given(request.headers.get(DEADLINE_HEADER), default_s))


def _action_routes(app: FastAPI, bindings: Bindings, max_body_bytes: int) -> None:
    async def step(request: Request, lease_id: str) -> Response:
        body = await parsed(request, api.StepRequest, max_body_bytes)
        reply = await bindings.step(lease_id, body, _deadline_s(request, 30.0))
        return Response(reply.model_dump_json(), media_type="application/json")

    async def execute(request: Request, lease_id: str) -> Response:
        body = await parsed(request, api.ExecuteRequest, max_body_bytes)
        limit_s = _deadline_s(request, body.timeout_s + 10.0)
        if body.timeout_s >= limit_s:
            raise ApiError(
                "bad_request",
                f"timeout_s={body.timeout_s:g} is more than this call may take ({limit_s:.1f} s): nothing was run; "
                f"lower it, or send a longer {DEADLINE_HEADER}",
            )
        reply = await bindings.execute(lease_id, body, limit_s)
        return Response(reply.model_dump_json(), media_type="application/json")

    async def screenshot(request: Request, lease_id: str) -> Response:
        _, watched = bindings.get(lease_id)
        async with asyncio.timeout(_deadline_s(request, 20.0)):
            capture = await watched.desktop.screenshot()
        return Response(capture.png, media_type="image/png", headers={"etag": capture.sha256})

    for call, method in ((step, "POST"), (execute, "POST"), (screenshot, "GET")):
        path = f"/v1/leases/{{lease_id}}/{call.__name__}"
        app.router.add_api_route(path, call, methods=[method], route_class_override=LeaseRoute)

    @app.post("/v1/leases/{lease_id}/reset", response_model=api.BindReply)
    async def reset(request: Request, lease_id: str) -> api.BindReply:
        return await bindings.reset(lease_id, _deadline_s(request, 60.0))


def _work_routes(app: FastAPI, bindings: Bindings, work: Work) -> None:
    @app.get("/v1/leases/{lease_id}/file", response_class=Response)
    async def file(request: Request, lease_id: str, path: str) -> Response:
        _, watched = bindings.get(lease_id)
        try:
            async with asyncio.timeout(_deadline_s(request, 50.0)):
                data = await watched.desktop.get_file(path)
        except TimeoutError:
            raise
        except OSError as error:
            raise ApiError("not_found", f"{path}: {error.strerror or error}") from None
        return Response(data, media_type="application/octet-stream")

    @app.post("/v1/leases/{lease_id}/setup", response_model=api.SetupReply)
    async def setup(request: Request, lease_id: str, body: api.SetupRequest) -> api.SetupReply:
        _, watched = bindings.get(lease_id)
        with watched.busy():
            return await work.setup(watched.desktop, body, _deadline_s(request, body.timeout_s))

    @app.post("/v1/leases/{lease_id}/evaluate", response_model=api.EvaluateReply)
    async def evaluate(request: Request, lease_id: str, body: api.EvaluateRequest) -> api.EvaluateReply:
        _, watched = bindings.get(lease_id)
        with watched.busy():
            return await work.evaluate(watched.desktop, body, _deadline_s(request, body.timeout_s + 10.0))


def _port_routes(app: FastAPI, bindings: Bindings, tokens: Tokens) -> None:
    """Services inside the desktop: Chrome's debugger, VLC."""

    async def call(request: Request, lease_id: str, service: str, path: str) -> Response:
        _, watched = bindings.get(lease_id)
        headers = relay.passed(request.headers)
        if relay.AUTHORIZATION in request.headers:
            headers["authorization"] = request.headers[relay.AUTHORIZATION]
        target = _target(relay.raw_tail(request.scope, 6), request.url.query)
        size = declared_bytes(request.scope)
        if size:
            headers["content-length"] = str(size)
        body = request.stream() if size else b""
        desktop = watched.desktop
        return relay.to_response(
            await relay.call_inside(desktop, service, request.method, target, body, headers)
        )

    methods = ["GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS"]
    app.add_api_route("/v1/leases/{lease_id}/port/{service}/{path:path}", call, methods=methods)

    @app.websocket("/v1/leases/{lease_id}/port/{service}/{path:path}")
    async def join(websocket: WebSocket, lease_id: str, service: str, path: str) -> None:
        try:
            tokens.principal(websocket)
            _, watched = bindings.get(lease_id)
            async with relay.inside(watched.desktop, service) as (session, url):
                target = url + _target(relay.raw_tail(websocket.scope, 6), websocket.url.query)
                headers = relay.passed(websocket.headers)
                await relay.relay_websocket(
                    websocket, lambda protocols: open_websocket(session, target, headers, protocols)
                )
        except ApiError as error:
            await relay.deny(websocket, error)


def _target(path: str, query: str) -> str:
    return f"/{path}?{query}" if query else f"/{path}"


class _PassThrough:
    """Hands a request to the OSWorld server of the lease's desktop, path and body as they came."""

    def __init__(self, bindings: Bindings, work: Work) -> None:
        self._bindings, self._work = bindings, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _, watched = self._bindings.get(scope["path_params"]["lease_id"])
            inner = self._work.server(watched.desktop)
        except Exception as error:
            await error_response(to_api(error))(scope, receive, send)
            return
        path = "/" + scope["path_params"]["path"]
        plain = {name: scope[name] for name in _SCOPE if name in scope}
        raw_path = f"/{relay.raw_tail(scope, 5)}".encode()
        await inner({**plain, "path": path, "raw_path": raw_path, "root_path": ""}, receive, send)
