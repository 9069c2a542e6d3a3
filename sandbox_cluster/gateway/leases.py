"""The table of leases: who holds what, whose it is, when it ends. Times are monotonic; what must survive goes to State."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from sandbox_cluster.api import Lease, LeaseView
from sandbox_cluster.errors import ApiError
from sandbox_cluster.gateway.state import LeaseRecord, State
from sandbox_cluster.serving import event

KEEP_ENDED_S = 3600.0


class Leases:
    """Leases by id, key and secret, kept in `state`."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.by_id: dict[str, LeaseRecord] = {}
        self._by_key: dict[tuple[str, str], str] = {}
        self._by_secret: dict[str, str] = {}
        self._deadlines: dict[str, float] = {}
        self._num_in_flight: dict[str, int] = {}
        self._ended_mono: dict[str, float] = {}

    def load(self) -> list[LeaseRecord]:
        """All leases of the last life; the live ones get one more ttl."""
        for lease in self._state.leases():
            self._index(lease)
            self.touch(lease)
            if lease.state == "ended":
                self._ended_mono[lease.lease_id] = time.monotonic()
        return list(self.by_id.values())

    def add(self, lease: LeaseRecord) -> None:
        """A new lease. Raises ApiError when it cannot be written: then it does not exist."""
        self._state.put_lease(lease)
        self._index(lease)

    def go_live(self, lease: LeaseRecord) -> None:
        """The lease has its desktop. Raises ApiError when that cannot be written: a lease must outlive the gateway."""
        lease.state, lease.granted_s = "live", time.time()
        self._state.put_lease(lease)
        self.touch(lease)

    def end(self, lease: LeaseRecord, reason: str, *, is_desktop_gone: bool) -> None:
        """Over for the client from now on. `ended` if the desktop is known to be gone, else `ending`."""
        lease.state = "ended" if is_desktop_gone else "ending"
        lease.reason, lease.ended_s = reason, time.time()
        self._ended_mono[lease.lease_id] = time.monotonic()
        self._deadlines.pop(lease.lease_id, None)
        self._by_secret.pop(lease.secret, None)
        self.save(lease)

    def save(self, lease: LeaseRecord) -> None:
        """Write it. Ends are true in memory first: on a full disk a restart finds the lease live, and reaps it by its ttl."""
        try:
            self._state.put_lease(lease)
        except ApiError as error:
            event("state_not_written", lease=lease.lease_id, error=str(error))

    # use

    def of_key(self, principal: str, key: str) -> LeaseRecord | None:
        return self.by_id.get(self._by_key.get((principal, key), ""))

    def of_host(self, host_id: str) -> list[LeaseRecord]:
        """Leases that have or may have a desktop there."""
        return [lease for lease in self.by_id.values() if lease.host_id == host_id and lease.state != "ended"]

    def of(self, lease_id: str, principal: str) -> LeaseRecord:
        """The lease. Raises ApiError `not_found`, for another's lease, too."""
        lease = self.by_id.get(lease_id)
        if lease is None or lease.principal != principal:
            raise ApiError("not_found", f"there is no lease {lease_id} of yours")
        return lease

    def use(self, lease_id: str, principal: str) -> LeaseRecord:
        """The live lease, its life renewed. Raises ApiError `not_found`, `gone`."""
        lease = self.of(lease_id, principal)
        if lease.state != "live":
            raise ApiError("gone", f"lease {lease.lease_id} has ended: {lease.reason}")
        self.touch(lease)
        return lease

    def use_secret(self, secret: str) -> LeaseRecord:
        """The live lease of a pass-through secret. Raises ApiError `unauthorized`: the secret is the only proof."""
        lease = self.by_id.get(self._by_secret.get(secret, ""))
        if lease is None or lease.state != "live":
            raise ApiError("unauthorized", "this pass-through path is unknown or its lease has ended")
        self.touch(lease)
        return lease

    def touch(self, lease: LeaseRecord) -> None:
        """A sign of life; of one that has ended it is none."""
        if lease.state == "live":
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
            self.touch(lease)

    def expired(self) -> list[LeaseRecord]:
        """Live leases without a sign of life for their ttl."""
        now = time.monotonic()
        late = [one for one, end in self._deadlines.items() if now > end and one not in self._num_in_flight]
        return [self.by_id[lease_id] for lease_id in late if self.by_id[lease_id].state == "live"]

    # views

    def body(self, lease: LeaseRecord) -> Lease:
        return Lease(**lease.model_dump(include=set(Lease.model_fields)), expires_s=self._expires_s(lease))

    def views(self, principal: str) -> list[LeaseView]:
        """Leases of `principal` that hold or held a desktop a moment ago; no secrets."""
        mine = [one for one in self.by_id.values() if one.principal == principal and one.state != "ended"]
        fields = set(LeaseView.model_fields)
        return [LeaseView(**one.model_dump(include=fields), expires_s=self._expires_s(one)) for one in mine]

    def _expires_s(self, lease: LeaseRecord) -> float:
        left_s = self._deadlines.get(lease.lease_id, 0.0) - time.monotonic()
        return time.time() + max(0.0, left_s)

    # indexes

    def _index(self, lease: LeaseRecord) -> None:
        self.by_id[lease.lease_id] = lease
        if lease.has_key:
            self._by_key[(lease.principal, lease.key)] = lease.lease_id
        if lease.state in ("placing", "live"):
            self._by_secret[lease.secret] = lease.lease_id

    def forget_key(self, lease: LeaseRecord) -> None:
        """The key got no desktop: it may ask again, after a restart, too."""
        if lease.has_key:
            lease.has_key = False
            self.save(lease)
        self._drop_key(lease)

    def _drop_key(self, lease: LeaseRecord) -> None:
        if self._by_key.get((lease.principal, lease.key)) == lease.lease_id:
            del self._by_key[(lease.principal, lease.key)]

    def forget_old(self) -> None:
        """Drop what ended KEEP_ENDED_S ago, by no clock that can be stepped (a restart counts as the end, again).
        Raises ApiError when the disk is full; tried again later."""
        edge = time.monotonic() - KEEP_ENDED_S
        old = [self.by_id[one] for one, ended in self._ended_mono.items() if ended < edge]
        old = [lease for lease in old if lease.state == "ended"]
        for lease in old:
            del self.by_id[lease.lease_id], self._ended_mono[lease.lease_id]
            self._drop_key(lease)
        self._state.drop_leases(lease.lease_id for lease in old)
