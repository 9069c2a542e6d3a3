"""The table of hosts: who is up, who has room, who fits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sandbox_cluster.api import HostBeat, HostRegistration, HostView, Requirements
from sandbox_cluster.errors import ApiError
from sandbox_cluster.gateway.state import LeaseRecord, State

FORGET_S = 600.0
ALIVE_S = 3.0
"""A host that was heard so lately is alive (it beats every second): another agent does not get its name."""


@dataclass
class Host:
    """One host agent, with times on the monotonic clock: a step of the wall clock changes nothing."""

    registration: HostRegistration
    last_beat_mono: float
    num_ready: int = 0
    num_black_captures: int = 0
    is_draining: bool = False
    is_lost: bool = False
    last_error: str = ""
    avoid_until_mono: float = 0.0
    """After a failed placement other hosts go first."""
    leases: set[str] = field(default_factory=set)
    """Leases placing, live or ending here."""
    num_placing: int = 0

    @property
    def host_id(self) -> str:
        return self.registration.host_id

    def view(self) -> HostView:
        state = "lost" if self.is_lost else "draining" if self.is_draining else "up"
        return HostView(
            **self.registration.model_dump(
                include={"host_id", "provider", "os", "screen_wh_px", "tags", "num_slots"}
            ),
            state=state,
            num_leased=len(self.leases),
            num_ready=self.num_ready,
            last_error=self.last_error,
        )

    def is_another(self, registration: HostRegistration) -> bool:
        """Is that an agent beside this one? At one address only one can listen: there it is this one, started again."""
        mine = self.registration
        return mine.epoch != registration.epoch and mine.url != registration.url

    def is_heard(self, now: float) -> bool:
        """Was there a sign of life a moment ago, other than that of an end?"""
        return now - self.last_beat_mono < ALIVE_S and (bool(self.leases) or not self.is_draining)

    def fits(self, need: Requirements) -> bool:
        has = self.registration
        return (
            (not need.os or need.os == has.os)
            and need.provider in (None, has.provider)
            and need.screen_wh_px in (None, has.screen_wh_px)
            and set(need.tags) <= set(has.tags)
        )

    def has_room(self, now: float) -> bool:
        return (
            not (self.is_lost or self.is_draining)
            and now >= self.avoid_until_mono
            and len(self.leases) < self.registration.num_slots
        )


class Hosts:
    """Hosts by id, kept in `state`."""

    def __init__(self, state: State, timeout_s: float) -> None:
        self._state = state
        self._timeout_s = timeout_s
        now = time.monotonic()
        self.by_id = {
            host.host_id: Host(host, now, is_draining=state.is_drained(host)) for host in state.hosts()
        }

    def register(self, registration: HostRegistration) -> None:
        """Add or renew a host. Raises ApiError `conflict` while another agent of its name is alive, `unavailable` when it
        cannot be written."""
        now = time.monotonic()
        known = self.by_id.get(registration.host_id)
        if known is not None and known.is_another(registration) and known.is_heard(now):
            raise ApiError(
                "conflict",
                f"another agent is host {registration.host_id}: the one at {known.registration.url} is alive; "
                "give each agent its own --host-id",
            )
        self._state.put_host(registration)
        host = self.by_id.setdefault(registration.host_id, Host(registration, now))
        host.registration, host.last_beat_mono = registration, now
        host.is_lost, host.is_draining = False, self._state.is_drained(registration)
        host.num_ready, host.avoid_until_mono = 0, 0.0

    def drain(self, host_id: str) -> Host:
        """No new lease in this life of the host, after a restart of the gateway, too. Raises ApiError `not_found`,
        `unavailable` when it cannot be written."""
        host = self.by_id.get(host_id)
        if host is None:
            raise ApiError("not_found", f"there is no host {host_id}; see GET /v1/hosts")
        self._state.put_drain(host_id, host.registration.epoch)
        host.is_draining = True
        return host

    def beat(self, host_id: str, beat: HostBeat) -> Host:
        """Note a sign of life. Raises ApiError `not_found` (register again) or `conflict` (another agent has the id)."""
        host = self.by_id.get(host_id)
        if host is None:
            raise ApiError("not_found", f"host {host_id} is not registered: register first")
        if host.registration.epoch != beat.epoch:
            raise ApiError(
                "conflict", f"another agent registered as host {host_id}: give each agent its own --host-id"
            )
        host.last_beat_mono = time.monotonic()
        host.is_lost = False
        host.num_ready = beat.num_ready
        host.num_black_captures = beat.num_black_captures
        host.is_draining = host.is_draining or beat.is_draining
        host.last_error = beat.last_error
        return host

    def newly_lost(self) -> list[Host]:
        """Hosts that fell silent since the last call."""
        edge = time.monotonic() - self._timeout_s
        lost = [host for host in self.by_id.values() if not host.is_lost and host.last_beat_mono < edge]
        for host in lost:
            host.is_lost = True
        return lost

    def forget_lost(self) -> None:
        """Drop hosts that have been silent for FORGET_S and hold no lease."""
        edge = time.monotonic() - FORGET_S
        for host in list(self.by_id.values()):
            if host.is_lost and not host.leases and host.last_beat_mono < edge:
                del self.by_id[host.host_id]
                self._state.drop_host(host.host_id)

    def choose(self, need: Requirements) -> Host | None:
        """The fitting host with room: most desktops ready, then most slots free."""
        now = time.monotonic()
        open_hosts = [host for host in self.by_id.values() if host.has_room(now) and host.fits(need)]
        return max(
            open_hosts,
            key=lambda host: (
                host.num_ready - host.num_placing > 0,
                host.registration.num_slots - len(host.leases),
                host.num_ready,
            ),
            default=None,
        )

    def attach(self, lease: LeaseRecord) -> None:
        if lease.host_id in self.by_id:
            self.by_id[lease.host_id].leases.add(lease.lease_id)

    def detach(self, lease: LeaseRecord) -> None:
        if lease.host_id in self.by_id:
            self.by_id[lease.host_id].leases.discard(lease.lease_id)

    def why_full(self, need: Requirements) -> str:
        """A sentence for an acquire that ran into its deadline."""
        if not self.by_id:
            return "no host is registered: start one with `python -m sandbox_cluster.host --gateway URL`"
        fitting = [host for host in self.by_id.values() if host.fits(need)]
        if not fitting:
            return f"no host fits the requirements {need.model_dump(exclude_none=True)}; see GET /v1/hosts"
        parts = [
            f"{view.host_id} is {view.state} with {view.num_leased} of {view.num_slots} leased"
            + (f" (last error: {view.last_error})" if view.last_error else "")
            for view in (host.view() for host in fitting)
        ]
        return "; ".join(parts)
