"""Calls from the gateway to host agents. Nothing that may act on a desktop is ever sent twice (I7).

aiohttp's client: a fifth of httpx's CPU a call, and every action goes through here. It repeats idempotent methods by itself on a
connection that was closed while idle; those of ours (GET, PUT, DELETE) may be repeated, and actions are POST.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from sandbox_cluster.api import BindReply, BindRequest, HostRegistration
from sandbox_cluster.deadlines import DEADLINE_HEADER, tighter
from sandbox_cluster.errors import STATUS, ApiError

CONNECT_S = 3.0
IDLE_S = 20.0
"""Less than the services' keep-alive, so that no request meets a connection that is being closed."""


@dataclass(frozen=True)
class Reply:
    """A host's answer, in full."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    content: bytes


class Upstream:
    """One HTTP client for all hosts. `open` inside the event loop, before the first call."""

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def bind(self, host: HostRegistration, lease_id: str, request: BindRequest) -> BindReply:
        """A desktop for the lease; the same one when asked again. Raises ApiError."""
        body = request.model_dump_json().encode()
        reply = await self.call(host, "PUT", f"/v1/leases/{lease_id}", body, request.wait_s + 5.0)
        if reply.status != 200:
            raise _error_of(reply)
        return BindReply.model_validate_json(reply.content)

    async def unbind(self, host: HostRegistration, lease_id: str) -> None:
        """The lease's desktop is gone or going. Raises ApiError when the host did not say so."""
        reply = await self.call(host, "DELETE", f"/v1/leases/{lease_id}", b"", 10.0)
        if reply.status not in (204, 404):
            raise _error_of(reply)

    async def call(
        self,
        host: HostRegistration,
        method: str,
        path: str,
        body: bytes,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """One request, sent at most once. Raises ApiError: `unavailable` (it did not reach the host) or
        `unknown_outcome` (it may have)."""
        sent = {
            "content-type": "application/json",
            **(headers or {}),
            "authorization": f"Bearer {host.call_token}",
            DEADLINE_HEADER: f"{tighter(timeout_s):.3f}",
        }
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_S, timeout_s))
        try:
            async with self._session.request(
                method,
                URL(host.url + path, encoded=True),
                data=body,
                headers=sent,
                timeout=limit,
                allow_redirects=False,
            ) as reply:
                content = await reply.read()
                return Reply(
                    reply.status, {name.lower(): value for name, value in reply.headers.items()}, content
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise ApiError(
                "unavailable",
                f"host {host.host_id} cannot be reached ({type(error).__name__}); nothing was done",
            ) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(
                "unknown_outcome",
                f"host {host.host_id} did not answer ({type(error).__name__}): the call may have acted and is not repeated",
            ) from None


def _error_of(reply: Reply) -> ApiError:
    try:
        body: dict[str, Any] = json.loads(reply.content)["error"]
        kind = str(body["kind"])
        return ApiError(kind if kind in STATUS else "internal", str(body["message"]))
    except (ValueError, KeyError, TypeError):
        return ApiError("internal", f"the host answered {reply.status} without a reason")
