"""Small promises of gateway and host that need no network."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_cluster.api import HostRegistration, Requirements
from sandbox_cluster.deadlines import given as given_deadline
from sandbox_cluster.deadlines import tighter
from sandbox_cluster.errors import STATUS, ApiError, to_api, to_core
from sandbox_cluster.gateway.hosts import Hosts
from sandbox_cluster.gateway.leases import KEEP_ENDED_S, Leases
from sandbox_cluster.gateway.state import LeaseRecord, State
from sandbox_cluster.host.__main__ import parse as parse_host
from sandbox_cluster.host.pool import MAX_QUARANTINE_S, Slot
from sandbox_cluster.host.service import config_of
from sandbox_cluster.providers import make_provider
from sandbox_cluster.providers.fake import FakeProvider
from sandbox_cluster.serving import bind, parse_tokens
from slime_cua.core.errors import (
    ConfigError,
    JudgeError,
    PreflightError,
    SandboxError,
    TaskError,
    UnknownOutcomeError,
)


@given(st.floats(0.01, 3600.0))
def test_every_layer_gives_the_next_less_time_than_it_has(seconds: float) -> None:
    step = seconds
    http = tighter(step)
    gateway = tighter(http)
    host = tighter(gateway)
    assert 0 < host < gateway < http < step


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, 7.0), ("", 7.0), ("x", 7.0), ("-1", 7.0), ("nan", 7.0), ("2.5", 2.5), ("1e9", 3600.0)],
)
def test_a_bad_deadline_header_is_the_default_and_a_long_one_is_bounded(
    header: str | None, seconds: float
) -> None:
    assert given_deadline(header, 7.0) == seconds


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnknownOutcomeError("x"), "unknown_outcome"),
        (TaskError("x"), "task"),
        (SandboxError("x"), "desktop"),
        (JudgeError("x"), "desktop"),
        (ConfigError("x"), "bad_request"),
        (TimeoutError(), "timeout"),
        (RuntimeError("x"), "internal"),
        (ApiError("gone", "x"), "gone"),
    ],
)
def test_every_error_has_a_kind_and_comes_back_as_an_error_of_the_tree(error: Exception, kind: str) -> None:
    api = to_api(error)
    assert api.kind == kind and api.status == STATUS[kind]
    back = to_core(kind, str(api))
    expected = {"unknown_outcome": UnknownOutcomeError, "task": TaskError}.get(kind, SandboxError)
    assert isinstance(back, expected)


def test_tokens_are_read_by_name_and_faults_are_named() -> None:
    assert parse_tokens("a:x, b:y", "T") == {"a": "x", "b": "y"} and parse_tokens("z", "T") == {
        "default": "z"
    }
    for text in ("", "a:", "a:x,a:y", "a:x,b:x"):
        with pytest.raises(PreflightError, match="T"):
            parse_tokens(text, "T")


def test_our_listening_sockets_say_that_they_are_tcp() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert sock.proto == socket.IPPROTO_TCP


def test_a_failing_slot_is_set_aside_for_longer_and_longer() -> None:
    slot = Slot(0)
    waits = []
    for _ in range(12):
        slot.failed()
        waits.append(round(slot.not_before_mono - time.monotonic()))
    assert waits[:6] == [0, 0, 30, 60, 120, 120] and waits[-1] == MAX_QUARANTINE_S


def record(lease_id: str, **more: object) -> LeaseRecord:
    plain = {
        "lease_id": lease_id,
        "secret": f"s-{lease_id}",
        "key": f"k-{lease_id}",
        "principal": "alice",
        "owner": "o",
        "ttl_s": 30.0,
        "host_id": "h",
        "host_epoch": "e",
        **more,
    }
    return LeaseRecord.model_validate(plain)


def test_the_state_is_private_and_what_is_written_is_read_again(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    state.put_lease(record("a", state="live"))
    state.put_lease(record("b"))
    state.put_lease(record("b", state="ended", reason="released"))
    state.close()
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0
    assert (tmp_path / "state" / "gateway.sqlite").stat().st_mode & 0o077 == 0
    again = State(tmp_path / "state")
    assert {lease.lease_id: lease.state for lease in again.leases()} == {"a": "live", "b": "ended"}
    again.close()


def test_a_live_lease_of_the_last_life_gets_one_more_ttl_whatever_the_wall_clock_says(tmp_path: Path) -> None:
    state = State(tmp_path)
    state.put_lease(record("a", state="live", granted_s=0.0))
    leases = Leases(state)
    leases.load()
    assert leases.expired() == [] and leases.use("a", "alice").lease_id == "a"
    assert leases.use_secret("s-a").lease_id == "a"
    state.close()


def host(epoch: str) -> HostRegistration:
    return HostRegistration(
        host_id="h",
        epoch=epoch,
        url="http://a:1",
        call_token="t",
        provider="fake",
        os="ubuntu",
        screen_wh_px=(8, 8),
        num_slots=1,
    )


def test_a_drain_outlives_the_gateway_and_ends_with_the_host_s_life(tmp_path: Path) -> None:
    """Killed before the host heard of it in a beat."""
    state = State(tmp_path)
    hosts = Hosts(state, 10.0)
    hosts.register(host("one"))
    assert hosts.choose(Requirements()) is not None
    hosts.drain("h")
    state.close()
    state = State(tmp_path)
    hosts = Hosts(state, 10.0)
    assert hosts.choose(Requirements()) is None
    hosts.register(host("one"))
    assert hosts.choose(Requirements()) is None
    hosts.register(host("two"))
    assert hosts.choose(Requirements()) is not None
    state.close()


@pytest.mark.parametrize("name", ["fake", "sandbox_cluster.providers.fake:FakeProvider"])
def test_a_host_takes_a_provider_by_name_or_a_class_of_ones_own(tmp_path: Path, name: str) -> None:
    options = parse_host(["--gateway", "http://g", "--provider", name])
    config = config_of(options)
    assert isinstance(make_provider(config.provider, config, tmp_path, "x"), FakeProvider)


def test_an_unknown_provider_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"provider = 'vbox'.*local, docker, qemu, remote, fake, or module:Class"
    ):
        config_of(parse_host(["--gateway", "http://g", "--provider", "vbox"]))


def test_a_message_after_the_end_of_its_lease_does_not_stop_the_reaping_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    state = State(tmp_path)
    leases = Leases(state)
    over, other = record("a"), record("b")
    for one in (over, other):
        leases.add(one)
        leases.go_live(one)
    leases.end(over, "released", is_desktop_gone=True)
    leases.touch(over)
    now += 2 * KEEP_ENDED_S
    leases.forget_old()
    assert leases.expired() == [other]
    state.close()


def test_an_ended_lease_gives_its_reason_and_its_secret_is_dead(tmp_path: Path) -> None:
    state = State(tmp_path)
    leases = Leases(state)
    one = record("a")
    leases.add(one)
    leases.go_live(one)
    leases.end(one, "the reason", is_desktop_gone=False)
    with pytest.raises(ApiError, match="the reason"):
        leases.use("a", "alice")
    with pytest.raises(ApiError, match="unknown or its lease has ended"):
        leases.use_secret("s-a")
    with pytest.raises(ApiError, match="no lease a of yours"):
        leases.use("a", "bob")
    state.close()
