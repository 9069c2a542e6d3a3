"""Calls from the gateway to host agents. Nothing that may act on a desktop is ever sent twice (I7)."""

from __future__ import annotations

import json
from typing import Any

import httpx

from sandbox_cluster.api import BindReply, BindRequest, HostRegistration
from sandbox_cluster.deadlines import DEADLINE_HEADER, tighter
from sandbox_cluster.errors import STATUS, ApiError

CONNECT_S = 3.0
IDLE_S = 20.0
"""Less than the services' keep-alive, so that no request meets a connection that is being closed."""


class Upstream:
    """One HTTP client for all hosts."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=IDLE_S)
        self._client = httpx.AsyncClient(limits=limits, trust_env=False)

    async def close(self) -> None:
        await self._client.aclose()

    async def bind(self, host: HostRegistration, lease_id: str, request: BindRequest) -> BindReply:
        """A desktop for the lease; the same one when asked again. Raises ApiError."""
        reply = await self.call(
            host, "PUT", f"/v1/leases/{lease_id}", request.model_dump_json().encode(), request.wait_s + 5.0
        )
        if reply.status_code != 200:
            raise _error_of(reply)
        return BindReply.model_validate_json(reply.content)

    async def unbind(self, host: HostRegistration, lease_id: str) -> None:
        """The lease's desktop is gone or going. Raises ApiError when the host did not say so."""
        reply = await self.call(host, "DELETE", f"/v1/leases/{lease_id}", b"", 10.0)
        if reply.status_code not in (204, 404):
            raise _error_of(reply)

    async def call(
        self,
        host: HostRegistration,
        method: str,
        path: str,
        body: bytes,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """One request, sent at most once. Raises ApiError: `unavailable` (it did not reach the host) or
        `unknown_outcome` (it may have)."""
        allowed_s = tighter(timeout_s)
        sent = {
            "content-type": "application/json",
            **(headers or {}),
            "authorization": f"Bearer {host.call_token}",
            DEADLINE_HEADER: f"{allowed_s:.3f}",
        }
        try:
            return await self._client.request(
                method,
                host.url + path,
                content=body,
                headers=sent,
                timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            )
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise ApiError(
                "unavailable",
                f"host {host.host_id} cannot be reached ({type(error).__name__}); nothing was done",
            ) from None
        except httpx.TransportError as error:
            raise ApiError(
                "unknown_outcome",
                f"host {host.host_id} did not answer ({type(error).__name__}): the call may have acted and is not repeated",
            ) from None


def _error_of(reply: httpx.Response) -> ApiError:
    try:
        body: dict[str, Any] = json.loads(reply.content)["error"]
        kind = str(body["kind"])
        return ApiError(kind if kind in STATUS else "internal", str(body["message"]))
    except (ValueError, KeyError, TypeError):
        return ApiError("internal", f"the host answered {reply.status_code} without a reason")
