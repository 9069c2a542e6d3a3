"""The gateway's decisions: who waits in which order, which host gives the desktop, what ends when."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandbox_cluster.api import (
    AcquireRequest,
    BindReply,
    BindRequest,
    HostBeat,
    HostBeatReply,
    HostRegistration,
)
from sandbox_cluster.errors import ApiError
from sandbox_cluster.gateway.hosts import Host, Hosts
from sandbox_cluster.gateway.leases import Leases
from sandbox_cluster.gateway.metrics import GatewayMetrics
from sandbox_cluster.gateway.state import LeaseRecord, State
from sandbox_cluster.serving import event
from slime_cua.core.errors import SandboxError

RETRY_HOST_S = 1.0
BIND_WAIT_S = 30.0
"""A host is given so long to have a desktop ready; then another may be tried."""


class HostCalls(Protocol):
    """What the broker asks of a host."""

    async def bind(self, host: HostRegistration, lease_id: str, request: BindRequest) -> BindReply: ...

    async def unbind(self, host: HostRegistration, lease_id: str) -> None: ...


@dataclass
class Ticket:
    """A place in the queue. Calls with the same key share one."""

    number: int
    principal: str
    request: AcquireRequest
    since_mono: float
    done: asyncio.Future[LeaseRecord] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    num_waiting: int = 0
    is_placing: bool = False

    @property
    def slot(self) -> tuple[str, str]:
        return self.principal, self.request.key


class Broker:
    """`start` and `close` bound its background work; `leases` is for the calls on a lease."""

    def __init__(
        self,
        state: State,
        calls: HostCalls,
        metrics: GatewayMetrics,
        *,
        host_timeout_s: float = 10.0,
        tick_s: float = 0.2,
    ) -> None:
        self.hosts = Hosts(state, host_timeout_s)
        self.leases = Leases(state)
        self._calls, self._metrics, self._tick_s = calls, metrics, tick_s
        self._tickets: dict[tuple[str, str], Ticket] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def start(self) -> None:
        """Take up what the last life left: live leases go on, half-placed ones are taken back."""
        for lease in self.leases.load():
            if lease.state != "ended":
                self.hosts.attach(lease)
            if lease.state == "placing":
                self._end(lease, "the gateway restarted while a desktop was looked for; acquire again")
                self.leases.forget_key(lease)
            elif lease.state == "ending":
                self._spawn(self._unbind(lease))
        self._spawn(self._tick())

    async def close(self) -> None:
        self._is_closed = True
        for ticket in list(self._tickets.values()):
            self._finish(
                ticket, ApiError("unavailable", "the gateway is stopping; acquire again with the same key")
            )
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # clients

    async def acquire(
        self, principal: str, request: AcquireRequest, gone: Callable[[], Awaitable[None]]
    ) -> LeaseRecord:
        """A live lease for `request.key`, in the order of asking. Raises ApiError `unavailable` at the deadline,
        `gone` when the key's lease has ended or the client left."""
        known = self.leases.of_key(principal, request.key)
        if known is not None and known.state == "live":
            self.leases.touch(known)
            return known
        if known is not None and known.state != "placing":
            raise ApiError(
                "gone", f"the lease of key {request.key!r} has ended ({known.reason}); use a new key"
            )
        ticket = self._tickets.get((principal, request.key))
        if ticket is None:
            ticket = Ticket(next(self._numbers), principal, request, time.monotonic())
            self._tickets[ticket.slot] = ticket
        ticket.num_waiting += 1
        try:
            return await self._wait(ticket, request.deadline_s, gone)
        finally:
            ticket.num_waiting -= 1
            if ticket.num_waiting == 0 and not ticket.is_placing:
                self._leave_queue(ticket)

    async def _wait(
        self, ticket: Ticket, deadline_s: float, gone: Callable[[], Awaitable[None]]
    ) -> LeaseRecord:
        leaving: asyncio.Future[None] = asyncio.ensure_future(gone())
        ends: set[asyncio.Future[Any]] = {ticket.done, leaving}
        try:
            self.pump()
            await asyncio.wait(ends, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if ticket.done.done():
            return ticket.done.result()
        if leaving.done():
            raise ApiError("gone", "the client left before its turn")
        why = self.hosts.why_full(ticket.request.requirements)
        raise ApiError("unavailable", f"no desktop became free within {deadline_s:g} s: {why}")

    def release(self, lease_id: str, principal: str) -> None:
        """End a lease of `principal`. Again is fine. Raises ApiError `not_found`."""
        lease = self.leases.of(lease_id, principal)
        if lease.state in ("placing", "live"):
            self._end(lease, "released")

    # hosts

    def register(self, registration: HostRegistration) -> None:
        """A host (re)started or came back. Leases of its earlier life are over."""
        self.hosts.register(registration)
        for lease in self.leases.of_host(registration.host_id):
            if lease.host_epoch != registration.epoch:
                self._end(lease, f"host {registration.host_id} restarted", is_desktop_gone=True)
        event("host_registered", host=registration.host_id, slots=registration.num_slots)
        self.pump()

    def beat(self, host_id: str, beat: HostBeat) -> HostBeatReply:
        host = self.hosts.beat(host_id, beat)
        held = {lease.lease_id: lease for lease in self.leases.of_host(host_id)}
        for lease_id, why in beat.lost.items():
            if lease_id in held:
                self._end(held[lease_id], f"its desktop failed: {why}", is_desktop_gone=True)
        over = tuple(one for one in beat.leases if one not in held or held[one].state in ("ending", "ended"))
        self.pump()
        return HostBeatReply(release=over, is_draining=host.is_draining)

    # placement

    def pump(self) -> None:
        """Give free desktops to the longest waiting; one that needs another kind of host is passed over."""
        if self._is_closed:
            return
        for ticket in sorted(self._tickets.values(), key=lambda one: one.number):
            if ticket.is_placing or ticket.num_waiting == 0:
                continue
            host = self.hosts.choose(ticket.request.requirements)
            if host is not None:
                self._place(ticket, host)
        self._metrics.num_waiting.set(len(self._tickets))

    def _place(self, ticket: Ticket, host: Host) -> None:
        request = ticket.request
        lease = LeaseRecord(
            lease_id=f"l-{secrets.token_hex(8)}",
            secret=secrets.token_urlsafe(24),
            principal=ticket.principal,
            ttl_s=request.ttl_s,
            host_id=host.host_id,
            host_epoch=host.registration.epoch,
            **request.model_dump(include={"key", "owner", "task_id", "episode_id"}),
        )
        try:
            self.leases.add(lease)
        except ApiError as error:
            self._finish(ticket, error)
            return
        self.hosts.attach(lease)
        ticket.is_placing = True
        host.num_placing += 1
        self._spawn(self._bind(ticket, host, lease))

    async def _bind(self, ticket: Ticket, host: Host, lease: LeaseRecord) -> None:
        request = ticket.request
        left_s = max(1.0, ticket.since_mono + request.deadline_s - time.monotonic())
        body = BindRequest(
            wait_s=min(BIND_WAIT_S, left_s), **request.model_dump(include={"owner", "task_id", "episode_id"})
        )
        try:
            reply = await self._calls.bind(host.registration, lease.lease_id, body)
        except SandboxError as error:
            host.last_error = str(error)
            host.avoid_until_mono = time.monotonic() + RETRY_HOST_S
            self._take_back(lease, f"host {host.host_id} gave no desktop: {error}")
            return
        finally:
            ticket.is_placing = False
            host.num_placing -= 1
            if ticket.num_waiting == 0:
                self._leave_queue(ticket)
        if lease.state != "placing" or ticket.num_waiting == 0:
            self._take_back(lease, "the client left before its turn")
            return
        lease.provider, lease.os, lease.screen_wh_px = reply.provider, reply.os, reply.screen_wh_px
        try:
            self.leases.go_live(lease)
        except ApiError as error:
            self._take_back(lease, str(error))
            self._finish(ticket, error)
            return
        host.num_ready = max(0, host.num_ready - 1)
        self._metrics.clock_skew_seconds.observe(abs(reply.clock_skew_s))
        self._metrics.acquire_seconds.observe(time.monotonic() - ticket.since_mono)
        event("lease_granted", **_ids(lease), owner=lease.owner)
        self._finish(ticket, lease)

    def _take_back(self, lease: LeaseRecord, reason: str) -> None:
        """A placement that came to nothing: its key is as if never used."""
        if lease.state in ("placing", "live"):
            self._end(lease, reason)
        self.leases.forget_key(lease)

    def _finish(self, ticket: Ticket, outcome: LeaseRecord | ApiError) -> None:
        self._leave_queue(ticket)
        if ticket.done.done():
            return
        if isinstance(outcome, LeaseRecord):
            ticket.done.set_result(outcome)
        else:
            ticket.done.set_exception(outcome)
            ticket.done.exception()

    def _leave_queue(self, ticket: Ticket) -> None:
        if self._tickets.get(ticket.slot) is ticket:
            del self._tickets[ticket.slot]

    # ends

    def _end(self, lease: LeaseRecord, reason: str, *, is_desktop_gone: bool = False) -> None:
        """Over for the client at once; the desktop is ended by its host, which is asked until it answers."""
        self.leases.end(lease, reason, is_desktop_gone=is_desktop_gone)
        self._metrics.ended.labels(reason=reason.split(":")[0].split(" ")[0]).inc()
        event("lease_ended", **_ids(lease), reason=reason)
        if is_desktop_gone:
            self.hosts.detach(lease)
        else:
            self._spawn(self._unbind(lease))

    async def _unbind(self, lease: LeaseRecord) -> None:
        while lease.state == "ending":
            host = self.hosts.by_id.get(lease.host_id)
            if host is None or host.is_lost or host.registration.epoch != lease.host_epoch:
                break
            try:
                await self._calls.unbind(host.registration, lease.lease_id)
                break
            except SandboxError:
                await asyncio.sleep(RETRY_HOST_S)
        lease.state = "ended"
        self.hosts.detach(lease)
        self.leases.save(lease)
        self.pump()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            for lease in self.leases.expired():
                self._end(lease, f"expired: no sign of life for {lease.ttl_s:g} s")
            for host in self.hosts.newly_lost():
                event("host_lost", host=host.host_id)
                for lease in self.leases.of_host(host.host_id):
                    self._end(lease, f"host {host.host_id} is lost", is_desktop_gone=True)
            with contextlib.suppress(ApiError):
                self.hosts.forget_lost()
                self.leases.forget_old()
            self.pump()
            self._metrics.observe(self.hosts, self.leases.by_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._is_closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _ids(lease: LeaseRecord) -> dict[str, str]:
    return {
        "lease": lease.lease_id,
        "host": lease.host_id,
        "task": lease.task_id,
        "episode": lease.episode_id,
    }
