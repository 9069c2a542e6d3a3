"""Prometheus metrics of one gateway, in a registry of its own so that two gateways fit one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from sandbox_cluster.gateway.hosts import Hosts
    from sandbox_cluster.gateway.state import LeaseRecord

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.num_waiting = Gauge(
            "sandbox_acquires_waiting", "Clients waiting for a desktop", registry=registry
        )
        self.acquire_seconds = Histogram(
            "sandbox_acquire_seconds", "From asking to holding a desktop", buckets=_SECONDS, registry=registry
        )
        self.call_seconds = Histogram(
            "sandbox_call_seconds",
            "Calls on a lease, host included",
            ["call", "outcome"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.clock_skew_seconds = Histogram(
            "sandbox_clock_skew_seconds",
            "A desktop's clock against its host's, when it was handed out",
            buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1),
            registry=registry,
        )
        self.black = Gauge(
            "sandbox_black_captures",
            "Screens that were black twice in a row, since their hosts started",
            registry=registry,
        )
        self.ended = Counter(
            "sandbox_leases_ended", "Leases ended by first word of the reason", ["reason"], registry=registry
        )
        self.leases = Gauge("sandbox_leases", "Leases by state", ["state"], registry=registry)
        self.hosts = Gauge("sandbox_hosts", "Hosts by state", ["state"], registry=registry)
        self.ready = Gauge("sandbox_desktops_ready", "Warm desktops over all hosts", registry=registry)

    def observe(self, hosts: Hosts, leases: dict[str, LeaseRecord]) -> None:
        """Set the gauges from the tables."""
        by_state = {"placing": 0, "live": 0, "ending": 0}
        for lease in leases.values():
            if lease.state in by_state:
                by_state[lease.state] += 1
        for state, count in by_state.items():
            self.leases.labels(state=state).set(count)
        views = [host.view() for host in hosts.by_id.values()]
        for state in ("up", "draining", "lost"):
            self.hosts.labels(state=state).set(sum(view.state == state for view in views))
        self.black.set(sum(host.num_black_captures for host in hosts.by_id.values()))
        self.ready.set(sum(view.num_ready for view in views if view.state == "up"))

    def render(self) -> bytes:
        return generate_latest(self.registry)
