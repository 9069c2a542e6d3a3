"""What a careless or hostile user of the gateway tries: none of it brings the gateway down, reaches another's desktop, or leaks one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_cluster.api import BindRequest, HostBeat, HostRegistration
from sandbox_cluster.errors import ApiError
from sandbox_cluster.gateway.app import MAX_TALK_BYTES
from sandbox_cluster.gateway.hosts import Hosts
from sandbox_cluster.gateway.leases import KEEP_ENDED_S, Leases
from sandbox_cluster.gateway.state import LeaseRecord, State
from sandbox_cluster.serving import read_token_file
from slime_cua.core.errors import PreflightError
from tests.contract.gateway_rig import ALICE, CLICK, HOST, Rig, acquire_body, eventually


@pytest.mark.parametrize("token", ["", "wrong", HOST, "é"])
async def test_who_has_no_token_is_told_so_before_anything_else(tmp_path: Path, token: str) -> None:
    rig = Rig(tmp_path)
    async with rig.gateway(), rig.http("") as http:
        headers = {"authorization": f"Bearer {token}".encode()} if token else {}
        for body in (b"{}", b"no JSON", json.dumps(acquire_body()).encode()):
            reply = await http.post("/v1/leases", content=body, headers=headers)
            assert reply.status_code == 401, body
        reply = await http.post("/v1/hosts", content=b"{}", headers={"authorization": f"Bearer {ALICE}"})
        assert reply.status_code == 401
        reply = await http.post("/v1/hosts/h1/beat", content=b"{}")
        assert reply.status_code == 401


async def test_a_body_without_end_is_refused_and_not_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def long() -> AsyncIterator[bytes]:
        yield b'{"key": "'
        for _ in range(8 * MAX_TALK_BYTES >> 16):
            yield b"k" * (1 << 16)

    async with rig.gateway(), rig.http() as http:
        reply = await http.post("/v1/leases", content=long())
        assert reply.status_code == 413 and "larger than 1 MiB" in reply.text
        assert (await http.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttl_s": "Infinity"},
        {"ttl_s": "NaN"},
        {"ttl_s": "1e12"},
        {"ttl_s": "0"},
        {"ttl_s": "-5"},
        {"deadline_s": "NaN"},
        {"deadline_s": "-1"},
        {"key": '""'},
        {"key": json.dumps("k" * 10_000)},
    ],
)
async def test_a_number_that_makes_no_lease_is_400_and_the_gateway_starts_again(
    tmp_path: Path, wrong: dict[str, str]
) -> None:
    """JSON's readers take NaN and Infinity, its writers do not: such a lease must not get into the state."""
    rig = Rig(tmp_path)
    fields = {name: json.dumps(value) for name, value in acquire_body().items()} | wrong
    body = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
    async with rig.gateway() as gateway, rig.host(), rig.http() as http:
        reply = await http.post(
            "/v1/leases", content=body, headers={"content-type": "application/json"}, timeout=30
        )
        assert reply.status_code == 400 and next(iter(wrong)) in reply.text, reply.text
        assert gateway.broker.leases.by_id == {}
    async with rig.gateway():
        pass


def record(lease_id: str, **more: Any) -> LeaseRecord:
    fields = {
        "secret": f"s-{lease_id}",
        "key": "k",
        "principal": "alice",
        "owner": "o",
        "ttl_s": 30.0,
        "host_id": "h",
        "host_epoch": "e",
    }
    return LeaseRecord(lease_id=lease_id, **{**fields, **more})


def test_a_row_that_cannot_be_read_costs_itself_and_not_the_gateway(tmp_path: Path) -> None:
    state = State(tmp_path)
    state.put_lease(record("good", state="live"))
    state._db.execute("INSERT INTO leases VALUES ('bad', 'live', 0, '{\"ttl_s\": null}')")
    state._db.execute("INSERT INTO hosts VALUES ('bad', 'no JSON')")
    state.close()
    state = State(tmp_path)
    assert [lease.lease_id for lease in state.leases()] == ["good"] and state.hosts() == []
    state.close()


def test_a_key_finds_its_lease_after_a_restart_though_a_first_host_gave_none(tmp_path: Path) -> None:
    """What is written of the placement that failed may be written after the one that held."""
    state = State(tmp_path)
    leases = Leases(state)
    failed, held = record("l-failed"), record("l-held")
    leases.add(failed)
    leases.end(failed, "host h gave no desktop", is_desktop_gone=False)
    leases.forget_key(failed)
    leases.add(held)
    leases.go_live(held)
    leases.save(failed)
    state.close()
    state = State(tmp_path)
    after = Leases(state)
    after.load()
    found = after.of_key("alice", "k")
    assert found is not None and found.lease_id == "l-held"
    state.close()


def test_a_key_without_a_desktop_may_ask_again_after_a_restart(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    leases = Leases(state)
    failed = record("l-failed")
    leases.add(failed)
    leases.end(failed, "host h gave no desktop", is_desktop_gone=True)
    leases.forget_key(failed)
    state.close()
    state = State(tmp_path / "state")
    after = Leases(state)
    after.load()
    assert after.of_key("alice", "k") is None
    state.close()


def test_a_stepped_clock_does_not_make_an_ended_key_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State(tmp_path)
    leases = Leases(state)
    lease = record("l")
    leases.add(lease)
    leases.end(lease, "released", is_desktop_gone=True)
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 2 * KEEP_ENDED_S)
    leases.forget_old()
    ended = leases.of_key("alice", "k")
    assert ended is not None and ended.state == "ended"
    state.close()


async def raw(url: str, request: bytes) -> bytes:
    """The reply to bytes that no client library would send."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(20):
        reply = await reader.read(65536)
    writer.close()
    return reply


@pytest.mark.parametrize(
    "path",
    [
        "%2e%2e/%2e%2e/{other}/screenshot",
        "../../{other}/screenshot",
        "..%2f..%2f{other}%2fscreenshot",
        "platform%20HTTP/1.1%0d%0ax-a:%20b%0d%0a%0d%0aGET%20/healthz",
        "platform%0d%0a%0d%0aDELETE%20/v1/leases/{other}%20HTTP/1.1%0d%0a%0d%0a",
        "platform%3fa=b%23c",
        "%00",
        "%ff%fe",
    ],
)
async def test_no_path_leads_out_of_a_leases_own_server(tmp_path: Path, path: str) -> None:
    rig = Rig(tmp_path)
    async with rig.gateway(), rig.host(slots=2), rig.client() as client:
        async with client.lease(key="mine") as mine, client.lease(key="other") as other:
            target = f"{mine.osworld_path}/{path.format(other=other.lease.lease_id)}"
            for method in ("GET", "POST"):
                head = f"{method} {target} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
                reply = await raw(rig.url, head.encode())
                assert b"PNG" not in reply and b'"ok"' not in reply
                assert reply.split()[1] in (b"400", b"404", b"200", b"405", b"503")
                assert b" 200 " not in reply.split(b"\r\n")[0] or b'"status"' in reply, reply
            for _ in range(5):
                shot = await other.step([CLICK])
                assert (shot.width_px, shot.height_px) == other.screen_wh_px
                assert (await mine.screenshot()).png.startswith(b"\x89PNG")


async def test_names_of_files_in_paths_come_through_as_they_were_written(tmp_path: Path) -> None:
    rig, seen = Rig(tmp_path), []

    async def inside(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(inside, "127.0.0.1", 0)
    async with server, rig.gateway(), rig.host() as machine, rig.client() as client, rig.http("") as http:
        async with client.lease(key="k") as sandbox:
            for driver in machine.provider.drivers.values():
                driver.ports[9222] = server.sockets[0].getsockname()[1]
            for path in ("json/new?https://a.example/%C3%A9?x=%26", "a%2Fb/c%20d%3Fe", "%25x"):
                reply = await http.get(f"/g/{sandbox.lease.secret}/cdp/{path}")
                assert reply.text == "ok" and seen[-1] == f"/{path}".encode()


def registration(epoch: str, url: str) -> HostRegistration:
    return HostRegistration(
        host_id="h",
        epoch=epoch,
        url=url,
        call_token="t",
        provider="fake",
        os="ubuntu",
        screen_wh_px=(8, 8),
        num_slots=1,
    )


def test_a_second_agent_of_one_name_does_not_push_the_living_one_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was killed is silent and makes room at once; so does one at the same address, where only one can listen."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    state = State(tmp_path)
    hosts = Hosts(state, 10.0)
    hosts.register(registration("one", "http://a:1"))
    now += 1.0
    hosts.beat("h", HostBeat(epoch="one", num_ready=1))
    now += 1.0
    with pytest.raises(ApiError, match=r"http://a:1 is alive.*--host-id") as refused:
        hosts.register(registration("two", "http://b:1"))
    assert refused.value.kind == "conflict"
    assert hosts.beat("h", HostBeat(epoch="one", num_ready=1)).registration.epoch == "one"
    hosts.register(registration("three", "http://a:1"))
    now += 4.0
    hosts.register(registration("four", "http://b:1"))
    assert hosts.by_id["h"].registration.epoch == "four"
    state.close()


async def test_a_draining_host_takes_no_lease_that_was_on_its_way(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.gateway(), rig.host(slots=2) as machine, rig.http() as http:
        draining = asyncio.ensure_future(machine.host.agent.drain(5.0))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="stops") as refused:
            await machine.host.bindings.bind("l-late", BindRequest())
        assert refused.value.kind == "unavailable"
        reply = await http.post("/v1/leases", json=acquire_body(deadline_s=0.5), timeout=20)
        assert reply.status_code == 503 and "draining" in reply.text
        await draining


async def test_a_program_that_may_run_longer_than_its_call_is_refused_before_it_starts(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    async with rig.gateway(), rig.host() as machine, rig.http() as http:
        lease = (await http.post("/v1/leases", json=acquire_body())).json()["lease_id"]
        action = {"language": "bash", "code": "echo ran > ran"}
        body = {"action_id": "a", "action": action, "timeout_s": 100}
        reply = await http.post(f"/v1/leases/{lease}/execute", json=body, timeout=30)
        assert reply.status_code == 400 and "x-deadline-s" in reply.text
        assert not any("/home/user/ran" in one.files for one in machine.provider.drivers.values())
        longer = {"x-deadline-s": "120"}
        reply = await http.post(f"/v1/leases/{lease}/execute", json=body, headers=longer, timeout=30)
        assert reply.status_code == 200
        await eventually(
            lambda: any("/home/user/ran" in one.files for one in machine.provider.drivers.values())
        )


@pytest.mark.parametrize(
    "content",
    [
        '{"clients": {"a": 5}, "hosts": {"h": "t"}}',
        '{"clients": {}, "hosts": {"h": "t"}}',
        '{"clients": {"a": "t"}, "hosts": {"h": "t"}}',
        '{"clients": {"a": "t", "b": "t"}, "hosts": {"h": "u"}}',
        '{"clients": {"a": ""}, "hosts": {"h": "t"}}',
    ],
)
def test_a_token_file_that_tells_nobody_apart_is_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokens").write_text(content)
    with pytest.raises(PreflightError, match=r"token file .* cannot be used"):
        read_token_file(tmp_path / "tokens")
