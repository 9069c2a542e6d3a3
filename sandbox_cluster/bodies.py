"""Request bodies, counted as they come: one above the limit is refused before anything was done with it.

A body that is sent on is kept in memory while it is small and in an unnamed file beyond that, since some of it must be known
before the first byte may leave (its digest, for calls that must not act twice).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import TracebackType
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from sandbox_cluster.errors import ApiError
from sandbox_cluster.serving import Tokens, error_response, faults

B = TypeVar("B", bound=BaseModel)
MEMORY_BYTES = 1 << 20
"""A longer body goes to a file."""
PART_BYTES = 256 << 10
SILENCE_S = 60.0
"""A body of which nothing comes for so long is given up."""
LINGER_S = 5.0
"""So long the rest of a refused body is read and thrown away: a client that still sends would see a broken connection and
not the answer."""


def too_large(most_bytes: int) -> ApiError:
    """The answer to a body on a lease that is larger than the configured limit."""
    return ApiError(
        "too_large",
        f"the body is larger than sandbox.max_body_mb = {most_bytes >> 20} MiB: nothing was done; "
        "raise it (--max-body-mb of gateway and hosts), or send less",
    )


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The whole body, in memory. Raises ApiError `too_large` above `most_bytes`."""
    error = ApiError("too_large", f"the body is larger than {most_bytes >> 20} MiB")
    return b"".join([part async for part in _counted(request, most_bytes, error)])


async def parsed(request: Request, kind: type[B], most_bytes: int) -> B:
    """The body as `kind`. Called after the token was looked at. Raises ApiError `too_large`, or `bad_request` naming the field."""
    try:
        return kind.model_validate_json(await read_body(request, most_bytes))
    except ValidationError as error:
        raise ApiError("bad_request", faults(error.errors())) from None


class Spooled:
    """A body that was read to its end. Close it, or use it as a context manager."""

    def __init__(self, mark: bytes) -> None:
        self.size = 0
        self._digest = hashlib.sha256(mark)
        self._file = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115 -- closed by close()

    def add(self, part: bytes) -> None:
        self.size += len(part)
        self._digest.update(part)
        self._file.write(part)

    @property
    def digest(self) -> str:
        """SHA-256 of the mark and the body."""
        return self._digest.hexdigest()

    def content(self) -> bytes | AsyncIterator[bytes]:
        """The body from its beginning: as bytes while it is small."""
        self._file.seek(0)
        return self._file.read() if self.size <= MEMORY_BYTES else self._parts()

    async def _parts(self) -> AsyncIterator[bytes]:
        while part := self._file.read(PART_BYTES):
            yield part

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Spooled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def spooled(
    request: Request, most_bytes: int, on_part: Callable[[], object] = lambda: None, mark: bytes = b""
) -> Spooled:
    """The whole body, to be sent on; `on_part` is called as it comes, `mark` goes into its digest. Raises ApiError
    `too_large`, `timeout`, or `unavailable` when there is no room for it."""
    body = Spooled(mark)
    try:
        async for part in _counted(request, most_bytes, too_large(most_bytes)):
            body.add(part)
            on_part()
    except OSError as error:
        body.close()
        raise ApiError(
            "unavailable",
            f"the body cannot be kept in {tempfile.gettempdir()} ({error.strerror}): nothing was done; free space there",
        ) from None
    except BaseException:
        body.close()
        raise
    return body


async def _counted(request: Request, most_bytes: int, error: ApiError) -> AsyncIterator[bytes]:
    stream = request.stream()
    size, is_refused = 0, (declared_bytes(request.scope) or 0) > most_bytes
    while not is_refused:
        try:
            async with asyncio.timeout(SILENCE_S):
                part = await anext(stream, None)
        except TimeoutError:
            raise ApiError(
                "timeout", f"the rest of the body did not come within {SILENCE_S:g} s: nothing was done"
            ) from None
        if part is None:
            return
        size += len(part)
        is_refused = size > most_bytes
        if not is_refused:
            yield part
    await _hear_out(stream)
    raise error


async def _hear_out(stream: AsyncGenerator[bytes, None]) -> None:
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(LINGER_S):
            async for _ in stream:
                pass


def declared_bytes(scope: Scope) -> int | None:
    """The body's length as its sender declares it; None when he does not, though there may be a body."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    if length.isdigit():
        return int(length)
    return None if b"transfer-encoding" in headers else 0


class Gate:
    """Stands before an application that reads whole bodies: who has no token, or sends too much or without saying how
    much, is answered before anything is read. Paths in `open_paths` need no token."""

    def __init__(self, app: ASGIApp, tokens: Tokens, most_bytes: int, open_paths: frozenset[str]) -> None:
        self._app, self._tokens = app, tokens
        self._most_bytes, self._open_paths = most_bytes, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                self._check(Request(scope, receive))
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        self._tokens.principal(request)
        size = declared_bytes(request.scope)
        if size is None:
            raise ApiError("bad_request", "a body needs a content-length here")
        if size > self._most_bytes:
            raise too_large(self._most_bytes)
