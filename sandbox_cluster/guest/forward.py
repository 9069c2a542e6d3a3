"""OSWorld's endpoints of a desktop that has a control server of its own: requests go to it as they came, each once.

One is served here instead when that server's is broken: some published images run a bash script and then fail over their
own logging (500, `_append_event`), which makes OSWorld's client run the script three times. A probe with `true` tells.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sandbox_cluster.bodies import declared_bytes
from sandbox_cluster.guest import server
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.osworld_http import ControlServer
from slime_cua.core.errors import SandboxError

CALL_S = 3630.0
"""More than their server gives its longest call: half an hour for opening a file, what the caller says for a bash script
(an hour here at most). Callers have their own, shorter ones."""
_KEPT_HEADERS = ("content-type", "content-disposition")


class Forwarder:
    """An ASGI application over `desktop.control_url`."""

    def __init__(self, desktop: Desktop) -> None:
        self._control = ControlServer(desktop.control_url, desktop.platform)
        self._own = server.create_app(desktop)
        self._is_bash_broken: bool | None = None
        self._app = self._make_app()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http" and scope["path"] == "/run_bash_script" and await self._needs_own_bash():
            app = self._own
        await app(scope, receive, send)

    async def _needs_own_bash(self) -> bool:
        if self._is_bash_broken is None:
            try:
                self._is_bash_broken = await self._control.has_broken_bash()
            except SandboxError:
                return False
        return self._is_bash_broken

    def _make_app(self) -> FastAPI:
        app = FastAPI(title="OSWorld control server", docs_url=None, redoc_url=None, openapi_url=None)

        @app.api_route("/{path:path}", methods=["GET", "POST"])
        async def forward(request: Request, path: str) -> Response:
            target = request.scope["raw_path"].decode()
            target = f"{target}?{request.url.query}" if request.url.query else target
            kind, size = request.headers.get("content-type", ""), declared_bytes(request.scope) or 0
            try:
                body = request.stream() if size else b""
                reply = await self._control.call(request.method, target, body, kind, CALL_S, size)
            except SandboxError as error:
                return JSONResponse({"status": "error", "message": str(error)}, 503)
            kept = {name: reply.headers[name] for name in _KEPT_HEADERS if name in reply.headers}
            return Response(reply.content, reply.status, headers=kept)

        return app


def application(desktop: Desktop) -> ASGIApp:
    """The OSWorld endpoints of `desktop`: its own server's where it has one, else ours over it."""
    return Forwarder(desktop) if desktop.control_url else server.create_app(desktop)
