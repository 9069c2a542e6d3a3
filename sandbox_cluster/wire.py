"""One HTTP request, sent once, with the two ways to fail kept apart: it did not leave, or its reply was lost (I7).

aiohttp's client: a fifth of httpx's CPU a call, and every action goes through here twice. It repeats idempotent methods by
itself on a connection that was closed while idle; those of ours (GET, PUT, DELETE) may be repeated, and actions are POST.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from slime_cua.core.errors import SandboxError, UnknownOutcomeError

CONNECT_S = 4.0
WEBSOCKET_S = 20.0
MAX_MESSAGE_BYTES = 96 << 20
"""Of one websocket message: Chrome's debugger sends whole pages and screenshots in one."""
MAX_REPLY_BYTES = 512 << 20
"""A longer reply is not kept: a program of the policy's may be what answers, and it may never end."""
IDLE_S = 20.0
"""Less than the services' keep-alive, so that no request meets a connection that is being closed."""


class NotSentError(SandboxError):
    """The request did not leave: nothing happened."""


@dataclass(frozen=True)
class Reply:
    """An answer, in full."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    content: bytes


class ReplyTooLong(aiohttp.ClientError):
    """The answer has more bytes than are kept."""


async def read_reply(reply: aiohttp.ClientResponse, most_bytes: int = MAX_REPLY_BYTES) -> Reply:
    """The answer in full. Raises ReplyTooLong, aiohttp.ClientError."""
    parts, size = [], 0
    async for part in reply.content.iter_any():
        size += len(part)
        if size > most_bytes:
            raise ReplyTooLong(f"the reply has more than {most_bytes >> 20} MiB")
        parts.append(part)
    names = {name.lower(): value for name, value in reply.headers.items()}
    return Reply(reply.status, names, b"".join(parts))


async def open_websocket(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], protocols: Iterable[str]
) -> aiohttp.ClientWebSocketResponse:
    """A websocket, without compression. Raises aiohttp.ClientError (WSServerHandshakeError: refused), TimeoutError."""
    async with asyncio.timeout(WEBSOCKET_S):
        return await session.ws_connect(
            url, headers=dict(headers), protocols=tuple(protocols), max_msg_size=MAX_MESSAGE_BYTES, compress=0
        )


class Wire:
    """A pool of connections. Made inside the event loop at the first request."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    def session(self) -> aiohttp.ClientSession:
        """The pool. Raises NotSentError once it was closed."""
        if self._is_closed:
            raise NotSentError("the client was closed; nothing was sent")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        method: str,
        url: str,
        body: bytes | AsyncIterable[bytes],
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> Reply:
        """The answer, whatever its status. Raises NotSentError, or UnknownOutcomeError when the reply was lost.

        body: one that comes in parts needs a content-length among the headers.
        """
        session = self.session()
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_S, timeout_s))
        try:
            async with session.request(
                method,
                URL(url, encoded=True),
                data=body,
                headers=headers,
                timeout=limit,
                allow_redirects=False,
            ) as reply:
                return await read_reply(reply)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise NotSentError(type(error).__name__) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnknownOutcomeError(type(error).__name__) from None
