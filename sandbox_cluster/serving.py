"""What gateway and host share as HTTP services: socket, tokens, errors, logs, readiness, and an end with their parent."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hmac
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection

from sandbox_cluster.errors import ApiError, to_api
from sandbox_cluster.wire import MAX_MESSAGE_BYTES
from slime_cua.core.errors import PreflightError, SlimeCuaError

log = logging.getLogger("sandbox_cluster")


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises PreflightError with a sentence when the port is taken or not ours to take."""
    # The protocol must be named: asyncio turns Nagle's delay (40 ms a reply) off only for sockets that say they are TCP.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PreflightError(
                f"port {port} on {host} is in use: stop the process that holds it, or choose another with --port"
            ) from None
        raise PreflightError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from None
    sock.set_inheritable(False)
    return sock


def hold(folder: Path, what: str) -> int:
    """A lock on the folder, by its file `what`.lock, until the descriptor is closed or this process ends, in whatever way.

    Raises PreflightError when another process has it, OSError when there can be no such file.
    """
    handle = os.open(folder / f"{what}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise PreflightError(
            f"another {what} keeps its state in {folder}: stop it, or choose another folder with --state"
        ) from None
    return handle


class Tokens:
    """Bearer tokens by principal name, compared in constant time."""

    def __init__(self, by_name: Mapping[str, str]) -> None:
        self._by_name = {name: token.encode() for name, token in by_name.items() if token}

    def principal(self, request: HTTPConnection) -> str:
        """The name whose token the request carries. Raises ApiError `unauthorized`."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        found = ""
        for name, token in self._by_name.items():
            if hmac.compare_digest(token, given.strip().encode()):
                found = name
        if scheme.lower() != "bearer" or not found:
            raise ApiError(
                "unauthorized",
                "no valid token: send `Authorization: Bearer TOKEN` with a token this service knows",
            )
        return found


def parse_tokens(text: str, source: str) -> dict[str, str]:
    """Name -> token from "name:token,name:token"; a part without a name is called "default".

    Raises PreflightError when there is no token or two names share one.
    """
    tokens: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.replace("\n", ",").split(","))):
        name, has_name, token = part.partition(":")
        name, token = (name, token) if has_name else ("default", name)
        if not token or name in tokens or token in tokens.values():
            raise PreflightError(
                f"{source}: entry {name!r} is empty or given twice; write name:token,name:token"
            )
        tokens[name] = token
    if not tokens:
        raise PreflightError(f"{source} holds no token: set it to name:token (or name:token,name:token)")
    return tokens


def read_token_file(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Client and host tokens of {"clients": {name: token}, "hosts": {name: token}}. Raises PreflightError."""
    try:
        body = json.loads(path.read_text())
        clients, hosts = dict(body["clients"]), dict(body["hosts"])
        check_tokens(clients, hosts)
        return clients, hosts
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PreflightError(
            f'token file {path} cannot be used ({error!r}): write {{"clients": {{"name": "token"}}, "hosts": {{"name": "token"}}}}'
        ) from None


def check_tokens(clients: Mapping[str, str], hosts: Mapping[str, str]) -> None:
    """Raises ValueError when a token is no text or empty, is given twice, or a side has none: who is who would be a guess."""
    tokens = [*clients.values(), *hosts.values()]
    if not clients or not hosts or not all(isinstance(token, str) and token for token in tokens):
        raise ValueError("clients and hosts need at least one token each, and tokens are texts")
    if len(set(tokens)) < len(tokens):
        raise ValueError("a token is given twice")


def faults(errors: Sequence[Any]) -> str:
    """The fields of a body that are wrong, and how."""
    return "; ".join(f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in errors[:5])


class LeaseRoute(APIRoute):
    """A route whose endpoint takes the request and the lease id and reads the body itself: nothing has to be made of its
    signature at each call, which cost as much as the call."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def handle(request: Request) -> Response:
            reply: Response = await self.endpoint(request, request.path_params["lease_id"])
            return reply

        return handle


def install_errors(app: FastAPI) -> None:
    """Every failure leaves as {"error": {"kind", "message"}}; a traceback goes to the log only."""

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(ApiError("bad_request", faults(error.errors())))

    @app.exception_handler(SlimeCuaError)
    async def _known(request: Request, error: SlimeCuaError) -> Response:
        return error_response(to_api(error))

    @app.exception_handler(Exception)
    async def _unknown(request: Request, error: Exception) -> Response:
        log.error("unexpected failure", exc_info=error)
        return error_response(to_api(error))


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.body, status_code=error.status)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time_s": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_logs(level: str = "INFO") -> None:
    """Structured logs to stderr, one JSON object a line. HTTP access logs are off: paths hold lease secrets."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel("WARNING")
    logging.getLogger("uvicorn").setLevel("WARNING")


class _NoPaths(logging.Filter):
    """uvicorn logs each websocket's path, which may hold a lease secret, and calls a refused upgrade incomplete."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "WebSocket %s" not in str(record.msg) and "without completing handshake" not in str(record.msg)


_no_paths = _NoPaths()


def event(name: str, **fields: object) -> None:
    """One structured log line. Never pass a secret."""
    log.info(name, extra={"fields": fields})


class _Server(uvicorn.Server):
    """Signals are ours: the host drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield


async def serve(
    app: FastAPI,
    sock: socket.socket,
    *,
    ready_fd: int | None = None,
    is_tied_to_stdin: bool = False,
    ready: Callable[[], Awaitable[object]] | None = None,
    on_stop: Callable[[], Awaitable[None]] | None = None,
    stop_grace_s: float = 10.0,
) -> None:
    """Serve `app` on `sock` until SIGTERM, SIGINT, or (if tied) end of stdin, which a dead parent causes.

    `ready_fd` gets {"port": N} and a line break once requests are answered and `ready` has returned. `on_stop` runs before connections close;
    a second signal, or end of stdin, cuts it short. If all of it takes longer than `stop_grace_s` after end of stdin, the process exits.
    """
    loop = asyncio.get_running_loop()
    stopping, cut_short = asyncio.Event(), asyncio.Event()

    def stop(is_cut: bool = False) -> None:
        if stopping.is_set() or is_cut:
            cut_short.set()
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if is_tied_to_stdin:
        _watch_stdin(loop, lambda: stop(is_cut=True), stop_grace_s)
    async with running(app, sock) as serving:
        if ready is not None and ready_fd is not None:
            await _first(ready(), stopping.wait())
        if ready_fd is not None:
            os.write(ready_fd, json.dumps({"port": sock.getsockname()[1]}).encode() + b"\n")
            os.close(ready_fd)
        await _first(stopping.wait(), asyncio.shield(serving))
        if on_stop and not cut_short.is_set():
            await _first(on_stop(), cut_short.wait())


@contextlib.asynccontextmanager
async def running(app: FastAPI, sock: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """`app` answers on `sock` inside the block. Gives the server's task, which ends early only if the server fails."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
        lifespan="on",
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_max_queue=1,
        ws_per_message_deflate=False,
    )
    logging.getLogger("uvicorn.error").addFilter(_no_paths)
    server = _Server(config)
    serving = asyncio.create_task(server.serve([sock]))
    try:
        await _until_started(server, serving)
        yield serving
    finally:
        server.should_exit = True
        await serving


async def _until_started(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    while not server.started:
        if serving.done():
            serving.result()
            raise PreflightError("the service ended before it started; its log says why")
        await asyncio.sleep(0.01)


async def _first(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: Callable[[], None], grace_s: float) -> None:
    parent = os.getppid()

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.getppid() == parent:
                if select.select([0], [], [], 1.0)[0] and not os.read(0, 4096):
                    break
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(stop)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


async def wait_disconnect(request: Request) -> None:
    """Return when the client of `request` has closed its connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
