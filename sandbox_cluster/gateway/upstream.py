"""Calls from the gateway to host agents. Nothing that may act on a desktop is ever sent twice (I7)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import aiohttp

from sandbox_cluster.api import BindReply, BindRequest, HostRegistration
from sandbox_cluster.bodies import Spooled
from sandbox_cluster.deadlines import DEADLINE_HEADER, tighter
from sandbox_cluster.errors import STATUS, ApiError
from sandbox_cluster.wire import NotSentError, Reply, Wire, open_websocket
from slime_cua.core.errors import UnknownOutcomeError


class Upstream:
    """One HTTP client for all hosts."""

    def __init__(self) -> None:
        self._wire = Wire()

    async def close(self) -> None:
        await self._wire.close()

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

    async def websocket(
        self, host: HostRegistration, path: str, headers: dict[str, str], protocols: Iterable[str]
    ) -> aiohttp.ClientWebSocketResponse:
        """A websocket of the host's. Raises aiohttp.ClientError, TimeoutError."""
        sent = {**headers, "authorization": f"Bearer {host.call_token}"}
        return await open_websocket(self._wire.session(), host.url + path, sent, protocols)

    async def call(
        self,
        host: HostRegistration,
        method: str,
        path: str,
        body: bytes | Spooled,
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
        content = body.content() if isinstance(body, Spooled) else body
        if isinstance(body, Spooled) and not isinstance(content, bytes):
            sent["content-length"] = str(body.size)
        try:
            return await self._wire.request(method, host.url + path, content, sent, timeout_s)
        except NotSentError as error:
            raise ApiError(
                "unavailable", f"host {host.host_id} cannot be reached ({error}); nothing was done"
            ) from None
        except UnknownOutcomeError as error:
            raise ApiError(
                "unknown_outcome",
                f"host {host.host_id} did not answer ({error}): the call may have acted and is not repeated",
            ) from None


def _error_of(reply: Reply) -> ApiError:
    try:
        body: dict[str, Any] = json.loads(reply.content)["error"]
        kind = str(body["kind"])
        return ApiError(kind if kind in STATUS else "internal", str(body["message"]))
    except (ValueError, KeyError, TypeError):
        return ApiError("internal", f"the host answered {reply.status} without a reason")
