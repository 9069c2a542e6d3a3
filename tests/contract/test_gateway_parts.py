"""Small promises of gateway and host that need no network."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_cluster.deadlines import given as given_deadline
from sandbox_cluster.deadlines import tighter
from sandbox_cluster.errors import STATUS, ApiError, to_api, to_core
from sandbox_cluster.gateway.leases import Leases
from sandbox_cluster.gateway.state import LeaseRecord, State
from sandbox_cluster.host.pool import MAX_QUARANTINE_S, Slot
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
