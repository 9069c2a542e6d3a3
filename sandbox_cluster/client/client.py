"""The rollout side of the gateway: lease a desktop, act, judge, give it back.

    async with SandboxClient(url, token) as client:
        async with client.lease(task_id=task.id, key=episode_id) as sandbox:
            await sandbox.setup(task)
            shot = await sandbox.step([GuiAction(kind="left_click", point=Point(x=500, y=250))], "episode-t0")
            reply = await sandbox.evaluate(task, "DONE")

Nothing that acts is sent twice (I7). Only acquire, heartbeat and release are repeated: they are idempotent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import TypeVar

from pydantic import BaseModel

from sandbox_cluster.api import AcquireRequest, Lease, Requirements
from sandbox_cluster.client.sandbox import Sandbox
from sandbox_cluster.deadlines import DEADLINE_HEADER, tighter
from sandbox_cluster.errors import to_core
from sandbox_cluster.wire import NotSentError, Reply, Wire
from slime_cua.config.sandbox import SandboxConfig
from slime_cua.core.errors import ConfigError, SandboxError, SlimeCuaError, UnknownOutcomeError

RETRY_S = 0.5
R = TypeVar("R", bound=BaseModel)


class SandboxClient:
    """One gateway, one token; many leases. Use as an async context manager."""

    def __init__(
        self,
        url: str,
        token: str,
        config: SandboxConfig | None = None,
        *,
        owner: str = "client",
        ttl_s: float = 30.0,
    ) -> None:
        self.config = config or SandboxConfig()
        self._owner, self._ttl_s = owner, ttl_s
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self._wire = Wire()

    async def __aenter__(self) -> SandboxClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._wire.close()

    @contextlib.asynccontextmanager
    async def lease(
        self,
        *,
        key: str,
        task_id: str = "",
        episode_id: str = "",
        requirements: Requirements | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Sandbox]:
        """A clean desktop of one's own until the block ends; heartbeats run meanwhile.

        `key` names this wish: asked again with it, the gateway gives the same lease. Raises SandboxError when no desktop
        is free within `timeout_s` (default: config.acquire_timeout_s), ConfigError for a wrong token.
        """
        request = AcquireRequest(
            key=key,
            owner=self._owner,
            task_id=task_id,
            episode_id=episode_id,
            requirements=requirements or Requirements(os=self.config.os),
            deadline_s=timeout_s or self.config.acquire_timeout_s,
            ttl_s=self._ttl_s,
        )
        lease = await self._acquire(request)
        sandbox = Sandbox(self, lease)
        beats = asyncio.create_task(self._heartbeats(sandbox))
        try:
            yield sandbox
        finally:
            beats.cancel()
            releasing = asyncio.ensure_future(self._release(lease.lease_id))
            with contextlib.suppress(SlimeCuaError):
                try:
                    await asyncio.shield(releasing)
                except asyncio.CancelledError:
                    await asyncio.wait({releasing}, timeout=2.0)
                    raise

    async def _acquire(self, request: AcquireRequest) -> Lease:
        end = time.monotonic() + request.deadline_s
        while True:
            left_s = max(0.5, end - time.monotonic())
            body = request.model_copy(update={"deadline_s": left_s})
            try:
                reply = await self.send("POST", "/v1/leases", body, left_s + 5.0)
                return Lease.model_validate_json(reply.content)
            except SandboxError as error:
                is_passing = isinstance(error, UnknownOutcomeError | NotSentError) or str(error).startswith(
                    "unavailable"
                )
                if not is_passing or time.monotonic() + RETRY_S > end:
                    raise
                await asyncio.sleep(RETRY_S)

    async def _release(self, lease_id: str) -> None:
        for _ in range(3):
            try:
                await self.send("DELETE", f"/v1/leases/{lease_id}", None, 10.0)
                return
            except (UnknownOutcomeError, NotSentError):
                await asyncio.sleep(RETRY_S)

    async def _heartbeats(self, sandbox: Sandbox) -> None:
        """Until cancelled. A lease that has ended is noted on the sandbox; a gateway that is away is asked again."""
        while True:
            await asyncio.sleep(self._ttl_s / 4)
            try:
                await self.send(
                    "POST", f"/v1/leases/{sandbox.lease.lease_id}/heartbeat", None, self._ttl_s / 4
                )
            except SlimeCuaError as error:
                if isinstance(error, ConfigError) or str(error).startswith(("gone", "not_found")):
                    sandbox.ended = str(error)
                    return

    async def call(self, kind: type[R], path: str, body: BaseModel | None, timeout_s: float) -> R:
        """POST once, the answer as `kind`. Raises core errors; UnknownOutcomeError when the reply was lost."""
        reply = await self._within(timeout_s, lambda: self.send("POST", path, body, tighter(timeout_s)))
        return kind.model_validate_json(reply.content)

    async def get(self, path: str, timeout_s: float) -> bytes:
        """GET once: the bytes."""
        return (
            await self._within(timeout_s, lambda: self.send("GET", path, None, tighter(timeout_s)))
        ).content

    async def _within(self, timeout_s: float, send: Callable[[], Awaitable[Reply]]) -> Reply:
        try:
            async with asyncio.timeout(timeout_s):
                return await send()
        except TimeoutError:
            raise UnknownOutcomeError(f"no answer within {timeout_s:g} s: the call may have acted") from None

    async def send(self, method: str, path: str, body: BaseModel | None, timeout_s: float) -> Reply:
        """One request, sent once. Raises the core error of an answer that is not a success."""
        content = body.model_dump_json().encode() if body is not None else b""
        headers = {**self._headers, DEADLINE_HEADER: f"{tighter(timeout_s):.3f}"}
        try:
            reply = await self._wire.request(method, self._url + path, content, headers, timeout_s)
        except NotSentError as error:
            raise NotSentError(f"the gateway cannot be reached ({error}): is it running?") from None
        except UnknownOutcomeError as error:
            raise UnknownOutcomeError(
                f"the gateway's reply was lost ({error}): the call may have acted and is not repeated"
            ) from None
        if reply.status < 400:
            return reply
        raise _error_of(reply)


def _error_of(reply: Reply) -> SlimeCuaError:
    try:
        error = json.loads(reply.content)["error"]
        return to_core(str(error["kind"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return SandboxError(f"the gateway answered {reply.status}: {reply.content[:200]!r}")
