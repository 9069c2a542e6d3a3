"""Leases: who waits, who holds what, when it ends. All times monotonic; what must survive goes to State."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandbox_cluster.api import (
    AcquireRequest,
    BindReply,
    BindRequest,
    HostBeat,
    HostBeatReply,
    HostRegistration,
    Lease,
    LeaseView,
)
from sandbox_cluster.errors import ApiError
from sandbox_cluster.gateway.hosts import Host, Hosts
from sandbox_cluster.gateway.metrics import GatewayMetrics
from sandbox_cluster.gateway.state import LeaseRecord, State
from sandbox_cluster.serving import event
from slime_cua.core.errors import SandboxError

KEEP_ENDED_S = 3600.0
RETRY_HOST_S = 1.0


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


class Broker:
    """The gateway's decisions. `start` and `close` bound its background work."""

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
        self.leases: dict[str, LeaseRecord] = {}
        self._state, self._calls, self._metrics, self._tick_s = state, calls, metrics, tick_s
        self._by_key: dict[tuple[str, str], str] = {}
        self._by_secret: dict[str, str] = {}
        self._tickets: dict[tuple[str, str], Ticket] = {}
        self._deadlines: dict[str, float] = {}
        self._num_in_flight: dict[str, int] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    # life

    def start(self) -> None:
        """Take up what the last life left: live leases get one more ttl, half-placed ones are taken back."""
        for lease in self._state.leases():
            self._index(lease)
            if lease.state == "live":
                self._deadlines[lease.lease_id] = time.monotonic() + lease.ttl_s
            elif lease.state == "placing":
                self._end(lease, "the gateway restarted while a desktop was looked for; acquire again")
            elif lease.state == "ending":
                self._spawn(self._unbind(lease))
        self._spawn(self._tick())

    async def close(self) -> None:
        self._is_closed = True
        for ticket in self._tickets.values():
            if not ticket.done.done():
                ticket.done.set_exception(
                    ApiError("unavailable", "the gateway is stopping; acquire again with the same key")
                )
                ticket.done.exception()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # clients

    async def acquire(
        self, principal: str, request: AcquireRequest, gone: Callable[[], Awaitable[None]]
    ) -> LeaseRecord:
        """A live lease for `request.key`, in the order of asking. Raises ApiError `unavailable` at the deadline,
        `gone` when the key's lease has ended or the client left."""
        slot = (principal, request.key)
        if slot in self._by_key:
            lease = self.leases[self._by_key[slot]]
            if lease.state == "live":
                self.touch(lease)
                return lease
            if lease.state != "placing":
                raise ApiError(
                    "gone", f"the lease of key {request.key!r} has ended ({lease.reason}); use a new key"
                )
        ticket = self._tickets.get(slot)
        if ticket is None:
            ticket = Ticket(next(self._numbers), principal, request, time.monotonic())
            self._tickets[slot] = ticket
        ticket.num_waiting += 1
        leaving: asyncio.Future[None] = asyncio.ensure_future(gone())
        try:
            self.pump()
            await asyncio.wait(
                _both(ticket.done, leaving), timeout=request.deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
            if ticket.done.done():
                return ticket.done.result()
            if leaving.done():
                raise ApiError("gone", "the client left before its turn")
            why = self.hosts.why_full(request.requirements)
            raise ApiError("unavailable", f"no desktop became free within {request.deadline_s:g} s: {why}")
        finally:
            leaving.cancel()
            ticket.num_waiting -= 1
            if ticket.num_waiting == 0 and self._tickets.get(slot) is ticket and not ticket.is_placing:
                del self._tickets[slot]

    def use(self, lease_id: str, principal: str) -> LeaseRecord:
        """The live lease, its life renewed. Raises ApiError: `not_found` (also for another's lease), `gone`."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.principal != principal:
            raise ApiError("not_found", f"there is no lease {lease_id} of yours")
        return self._live(lease)

    def use_secret(self, secret: str) -> LeaseRecord:
        """The live lease of a pass-through secret. Raises ApiError `unauthorized`: the secret is the only proof."""
        lease = self.leases.get(self._by_secret.get(secret, ""))
        if lease is None or lease.state != "live":
            raise ApiError("unauthorized", "this pass-through path is unknown or its lease has ended")
        return self._live(lease)

    def _live(self, lease: LeaseRecord) -> LeaseRecord:
        if lease.state != "live":
            raise ApiError("gone", f"lease {lease.lease_id} has ended: {lease.reason}")
        self.touch(lease)
        return lease

    def touch(self, lease: LeaseRecord) -> None:
        self._deadlines[lease.lease_id] = time.monotonic() + lease.ttl_s

    @contextlib.contextmanager
    def in_flight(self, lease: LeaseRecord) -> Iterator[None]:
        """While a call runs its client is alive: the lease does not expire under it."""
        count = self._num_in_flight
        count[lease.lease_id] = count.get(lease.lease_id, 0) + 1
        try:
            yield
        finally:
            count[lease.lease_id] -= 1
            if not count[lease.lease_id]:
                del count[lease.lease_id]
            if lease.state == "live":
                self.touch(lease)

    def release(self, lease_id: str, principal: str) -> None:
        """End a lease of `principal`. Again is fine. Raises ApiError `not_found`."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.principal != principal:
            raise ApiError("not_found", f"there is no lease {lease_id} of yours")
        if lease.state in ("placing", "live"):
            self._end(lease, "released")

    def lease_body(self, lease: LeaseRecord) -> Lease:
        left_s = self._deadlines.get(lease.lease_id, 0.0) - time.monotonic()
        fields = lease.model_dump(include=set(Lease.model_fields))
        return Lease(**fields, expires_s=time.time() + max(0.0, left_s))

    def views(self, principal: str) -> list[LeaseView]:
        mine = [
            lease for lease in self.leases.values() if lease.principal == principal and lease.state != "ended"
        ]
        return [
            LeaseView(
                **lease.model_dump(include=set(LeaseView.model_fields)),
                expires_s=time.time() + max(0.0, self._deadlines.get(lease.lease_id, 0.0) - time.monotonic()),
            )
            for lease in mine
        ]

    # hosts

    def register(self, registration: HostRegistration) -> None:
        if self.hosts.register(registration):
            for lease in self._of_host(registration.host_id):
                if lease.host_epoch != registration.epoch:
                    self._end(lease, f"host {registration.host_id} restarted", is_desktop_gone=True)
        event("host_registered", host=registration.host_id, slots=registration.num_slots)
        self.pump()

    def beat(self, host_id: str, beat: HostBeat) -> HostBeatReply:
        host = self.hosts.beat(host_id, beat)
        for lease_id, why in beat.lost.items():
            lease = self.leases.get(lease_id)
            if (
                lease is not None
                and lease.host_id == host_id
                and lease.state in ("placing", "live", "ending")
            ):
                self._end(lease, f"its desktop failed: {why}", is_desktop_gone=True)
        over = tuple(lease_id for lease_id in beat.leases if not self._holds(lease_id, host_id))
        self.pump()
        return HostBeatReply(release=over, is_draining=host.is_draining)

    def _holds(self, lease_id: str, host_id: str) -> bool:
        lease = self.leases.get(lease_id)
        return lease is not None and lease.host_id == host_id and lease.state in ("placing", "live")

    def drain(self, host_id: str) -> Host:
        host = self.hosts.by_id.get(host_id)
        if host is None:
            raise ApiError("not_found", f"there is no host {host_id}")
        host.is_draining = True
        return host

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
            self._state.put_lease(lease)
        except ApiError as error:
            self._finish(ticket, error)
            return
        self._index(lease)
        ticket.is_placing = True
        host.num_placing += 1
        self._spawn(self._bind(ticket, host, lease))

    async def _bind(self, ticket: Ticket, host: Host, lease: LeaseRecord) -> None:
        request = ticket.request
        left_s = max(1.0, ticket.since_mono + request.deadline_s - time.monotonic())
        body = BindRequest(
            wait_s=min(30.0, left_s), **request.model_dump(include={"owner", "task_id", "episode_id"})
        )
        try:
            reply = await self._calls.bind(host.registration, lease.lease_id, body)
        except SandboxError as error:
            host.last_error = str(error)
            host.avoid_until_mono = time.monotonic() + RETRY_HOST_S
            self._end(lease, f"host {host.host_id} gave no desktop: {error}")
            self._forget_key(lease)
            return
        finally:
            ticket.is_placing = False
            host.num_placing -= 1
            if ticket.num_waiting == 0:
                self._tickets.pop((ticket.principal, request.key), None)
        if lease.state != "placing":
            self._forget_key(lease)
            return
        if ticket.num_waiting == 0:
            self._end(lease, "the client left before its turn")
            self._forget_key(lease)
            return
        self._go_live(ticket, host, lease, reply)

    def _go_live(self, ticket: Ticket, host: Host, lease: LeaseRecord, reply: BindReply) -> None:
        lease.provider, lease.os, lease.screen_wh_px = reply.provider, reply.os, reply.screen_wh_px
        lease.state, lease.granted_s = "live", time.time()
        try:
            self._state.put_lease(lease)
        except ApiError as error:
            self._end(lease, str(error))
            self._forget_key(lease)
            self._finish(ticket, error)
            return
        host.num_ready = max(0, host.num_ready - 1)
        self.touch(lease)
        self._metrics.acquire_seconds.observe(time.monotonic() - ticket.since_mono)
        event(
            "lease_granted",
            lease=lease.lease_id,
            host=host.host_id,
            owner=lease.owner,
            task=lease.task_id,
            episode=lease.episode_id,
        )
        self._finish(ticket, lease)

    def _finish(self, ticket: Ticket, outcome: LeaseRecord | ApiError) -> None:
        self._tickets.pop((ticket.principal, ticket.request.key), None)
        if ticket.done.done():
            return
        if isinstance(outcome, LeaseRecord):
            ticket.done.set_result(outcome)
        else:
            ticket.done.set_exception(outcome)
            ticket.done.exception()

    # ends

    def _end(self, lease: LeaseRecord, reason: str, *, is_desktop_gone: bool = False) -> None:
        """Over for the client from now on; the desktop is destroyed by its host, asked until it answers."""
        lease.state = "ended" if is_desktop_gone else "ending"
        lease.reason, lease.ended_s = reason, time.time()
        self._deadlines.pop(lease.lease_id, None)
        self._by_secret.pop(lease.secret, None)
        self._metrics.ended.labels(reason=reason.split(":")[0].split(" ")[0]).inc()
        event(
            "lease_ended",
            lease=lease.lease_id,
            host=lease.host_id,
            task=lease.task_id,
            episode=lease.episode_id,
            reason=reason,
        )
        if is_desktop_gone:
            self.hosts.detach(lease)
        else:
            self._spawn(self._unbind(lease))
        self._save(lease)

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
        self._save(lease)
        self.pump()

    def _save(self, lease: LeaseRecord) -> None:
        """Ends are true in memory first; if the disk is full the tick writes them later."""
        try:
            self._state.put_lease(lease)
        except ApiError as error:
            event("state_not_written", lease=lease.lease_id, error=str(error))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            now = time.monotonic()
            for lease_id, deadline in list(self._deadlines.items()):
                lease = self.leases[lease_id]
                if lease.state == "live" and now > deadline and lease_id not in self._num_in_flight:
                    self._end(lease, f"expired: no sign of life for {lease.ttl_s:g} s")
            for host in self.hosts.newly_lost():
                event("host_lost", host=host.host_id)
                for lease in self._of_host(host.host_id):
                    self._end(lease, f"host {host.host_id} is lost", is_desktop_gone=True)
            self._forget_old()
            self.pump()
            self._metrics.observe(self.hosts, self.leases)

    def _forget_old(self) -> None:
        edge = time.time() - KEEP_ENDED_S
        old = [lease for lease in self.leases.values() if lease.state == "ended" and lease.ended_s < edge]
        for lease in old:
            del self.leases[lease.lease_id]
            self._forget_key(lease)
        with contextlib.suppress(ApiError):
            self.hosts.forget_lost()
            self._state.drop_leases(lease.lease_id for lease in old)

    # indexes

    def _index(self, lease: LeaseRecord) -> None:
        self.leases[lease.lease_id] = lease
        self._by_key[(lease.principal, lease.key)] = lease.lease_id
        if lease.state in ("placing", "live"):
            self._by_secret[lease.secret] = lease.lease_id
        if lease.state != "ended":
            self.hosts.attach(lease)

    def _forget_key(self, lease: LeaseRecord) -> None:
        """The key got no desktop: it may ask again."""
        if self._by_key.get((lease.principal, lease.key)) == lease.lease_id:
            del self._by_key[(lease.principal, lease.key)]

    def _of_host(self, host_id: str) -> list[LeaseRecord]:
        return [
            lease for lease in self.leases.values() if lease.host_id == host_id and lease.state != "ended"
        ]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._is_closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _both(*futures: asyncio.Future[Any]) -> set[asyncio.Future[Any]]:
    return set(futures)
