"""The host agent's talk with its gateway: registers, beats, hears which leases ended, drains."""

from __future__ import annotations

import asyncio
import contextlib
import time

import httpx

from sandbox_cluster.api import HostBeat, HostBeatReply, HostRegistration
from sandbox_cluster.host.bindings import Bindings
from sandbox_cluster.host.pool import Pool
from sandbox_cluster.serving import event
from slime_cua.core.errors import PreflightError

BEAT_S = 1.0
CALL_S = 5.0
NAME_S = 8.0
"""So long an agent that has our name may still be an earlier life of ours."""
ORPHAN_S = 600.0
"""So long without a gateway: the leases' clients cannot reach their desktops either; they are ended."""


class Agent:
    """`run` until cancelled; `drain` before that for a soft end."""

    def __init__(
        self,
        gateway_url: str,
        token: str,
        registration: HostRegistration,
        pool: Pool,
        bindings: Bindings,
        *,
        orphan_s: float = ORPHAN_S,
    ) -> None:
        self._registration, self._pool, self._bindings = registration, pool, bindings
        self._orphan_s = orphan_s
        self._client = httpx.AsyncClient(
            base_url=gateway_url,
            headers={"authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(CALL_S, connect=2.0),
            trust_env=False,
        )
        self._is_registered = False
        self._is_draining = False
        self._heard_mono = time.monotonic()
        self._refused_mono: float | None = None
        self.news = asyncio.Event()
        """Set it to beat at once."""
        self.registered = asyncio.Event()

    async def run(self) -> None:
        """Raises PreflightError when the gateway refuses this agent for good (token, host id)."""
        while True:
            await self._once()
            self._bindings.check()
            await self._pause()

    async def close(self) -> None:
        """Tell the gateway, if it listens, that the desktops end now."""
        self._is_draining = self._bindings.is_closed = True
        for lease_id in self._bindings.lease_ids:
            self._bindings.lose(lease_id, "the host stopped")
        with contextlib.suppress(Exception):
            async with asyncio.timeout(1.0):
                await self._once()
        await self._client.aclose()

    async def drain(self, timeout_s: float) -> None:
        """Take no new lease; return when the last one has ended or time is over."""
        self._is_draining = self._bindings.is_closed = True
        self.news.set()
        event("draining", num_leases=len(self._bindings.lease_ids))
        end = time.monotonic() + timeout_s
        while self._bindings.lease_ids and time.monotonic() < end:
            await asyncio.wait({self._bindings.next_end()}, timeout=end - time.monotonic())

    async def _once(self) -> None:
        try:
            if not self._is_registered:
                await self._register()
            else:
                await self._beat()
            self._heard_mono = time.monotonic()
        except httpx.HTTPError as error:
            event("gateway_unreachable", error=type(error).__name__)
            if time.monotonic() - self._heard_mono > self._orphan_s:
                for lease_id in self._bindings.lease_ids:
                    self._bindings.unbind(lease_id, f"no gateway for {self._orphan_s:g} s")

    async def _register(self) -> None:
        reply = await self._client.post(
            "/v1/hosts",
            content=self._registration.model_dump_json(),
            headers={"content-type": "application/json"},
        )
        if reply.status_code == 401:
            raise PreflightError(
                "the gateway does not know this host's token: give both the same SLIME_CUA_HOST_TOKENS"
            )
        if reply.status_code == 409:
            self._refused(reply.json()["error"]["message"])
        if reply.status_code in (400, 404, 422):
            raise PreflightError(
                f"the gateway at {self._client.base_url} refused this host: {reply.text[:300]}"
            )
        if reply.status_code == 204:
            self._is_registered, self._refused_mono = True, None
            self.registered.set()

    def _refused(self, why: str) -> None:
        """Another agent has the name. An earlier life of ours falls silent soon; one that does not is somebody else."""
        if self._refused_mono is None:
            self._refused_mono = time.monotonic()
        if time.monotonic() - self._refused_mono > NAME_S:
            raise PreflightError(why)

    async def _beat(self) -> None:
        lost = dict(self._bindings.lost)
        beat = HostBeat(
            epoch=self._registration.epoch,
            num_ready=self._pool.num_ready,
            leases=self._bindings.lease_ids,
            lost=lost,
            is_draining=self._is_draining,
            last_error=self._pool.last_error,
            num_black_captures=self._pool.num_black_captures,
        )
        reply = await self._client.post(
            f"/v1/hosts/{self._registration.host_id}/beat",
            content=beat.model_dump_json(),
            headers={"content-type": "application/json"},
        )
        if reply.status_code == 404:
            self._is_registered = False
            return
        if reply.status_code == 409:
            raise PreflightError(reply.json()["error"]["message"])
        if reply.status_code != 200:
            event("gateway_refuses_beat", status=reply.status_code)
            return
        for lease_id in lost:
            self._bindings.lost.pop(lease_id, None)
        answer = HostBeatReply.model_validate_json(reply.content)
        self._is_draining = self._is_draining or answer.is_draining
        for lease_id in answer.release:
            self._bindings.unbind(lease_id, "ended at the gateway")

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(BEAT_S if self._is_registered else 0.3):
                await self.news.wait()
        except TimeoutError:
            pass
        self.news.clear()
