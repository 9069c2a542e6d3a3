"""OSWorld's endpoints under the gateway's port: the path is the proof, a repeated body is not run again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from sandbox_cluster.providers.fake import EVENT_LOG
from tests.contract.gateway_rig import CLICK, Machine, Rig


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def cut_off(osworld: httpx.AsyncClient, url: str, machine: Machine) -> dict[str, object]:
    """The body of a command whose reply the client did not wait for; the machine stays slow."""
    body: dict[str, object] = {"command": "echo x >> /home/user/count", "shell": True}
    machine.provider.faults.latency_s = 3.0
    with pytest.raises(httpx.ReadTimeout):
        await osworld.post(url, json=body, timeout=httpx.Timeout(60, read=1.0))
    return body


async def test_guest_endpoints_answer_under_the_lease_secret_without_a_token(rig: Rig) -> None:
    async with rig.gateway(), rig.host(), rig.client() as client, rig.http("") as osworld:
        async with client.lease(key="k") as sandbox:
            path = sandbox.osworld_path
            shot = await osworld.get(f"{path}/screenshot")
            assert shot.status_code == 200 and shot.headers["content-type"] == "image/png"
            ran = await osworld.post(f"{path}/execute", json={"command": "echo hi", "shell": True})
            assert ran.json()["output"] == "hi\n" and ran.json()["returncode"] == 0
            size = await osworld.post(f"{path}/screen_size")
            assert size.json() == {"width": 320, "height": 200}
            up = await osworld.post(
                f"{path}/setup/upload", data={"file_path": "/home/user/a"}, files={"file_data": b"x"}
            )
            assert up.status_code == 200 and await sandbox.read_file("/home/user/a") == b"x"
            got = await osworld.post(f"{path}/file", data={"file_path": "/home/user/a"})
            assert got.content == b"x"
        assert (await osworld.get(f"{path}/screenshot")).status_code == 401


async def test_an_unknown_secret_is_401(rig: Rig) -> None:
    async with rig.gateway(), rig.host(), rig.http("") as osworld:
        assert (await osworld.get("/g/guess/server/screenshot")).status_code == 401
        assert (await osworld.post("/g//server/execute", json={"command": "true"})).status_code in (401, 404)


async def test_a_body_repeated_after_a_broken_connection_is_not_run_again(rig: Rig) -> None:
    async with rig.gateway(), rig.host() as machine, rig.client() as client, rig.http("") as osworld:
        async with client.lease(key="k") as sandbox:
            url = f"{sandbox.osworld_path}/execute"
            body = await cut_off(osworld, url, machine)
            again = await osworld.post(url, json=body, timeout=60)
            assert again.json()["returncode"] == 0
            machine.provider.faults.latency_s = 0.0
            assert await sandbox.read_file("/home/user/count") == b"x\n"
            await osworld.post(url, json=body)
            assert await sandbox.read_file("/home/user/count") == b"x\nx\n"


async def test_a_body_repeated_after_a_reset_is_run_on_the_new_desktop(rig: Rig) -> None:
    async with rig.gateway(), rig.host() as machine, rig.client() as client, rig.http("") as osworld:
        async with client.lease(key="k") as sandbox:
            url = f"{sandbox.osworld_path}/execute"
            body = await cut_off(osworld, url, machine)
            machine.provider.faults.latency_s = 0.0
            await sandbox.reset()
            assert (await osworld.post(url, json=body, timeout=60)).json()["returncode"] == 0
            assert await sandbox.read_file("/home/user/count") == b"x\n"


async def test_a_call_that_may_have_acted_answers_200_with_the_failure_inside(rig: Rig) -> None:
    async with rig.gateway(), rig.host() as machine, rig.client() as client, rig.http("") as osworld:
        async with client.lease(key="k") as sandbox:
            machine.provider.faults.num_lost_replies = 1
            reply = await osworld.post(
                f"{sandbox.osworld_path}/execute", json={"command": "echo hi", "shell": True}
            )
            assert reply.status_code == 200 and reply.json()["returncode"] != 0


async def test_the_secret_is_in_no_log_line(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="sandbox_cluster")
    async with rig.gateway(), rig.host(), rig.client() as client, rig.http("") as osworld:
        async with client.lease(key="k") as sandbox:
            await sandbox.step([CLICK])
            await osworld.get(f"{sandbox.osworld_path}/screenshot")
            secret = sandbox.lease.secret
    text = "\n".join(str(record.__dict__) for record in caplog.records if record.name == "sandbox_cluster")
    assert "lease_granted" in text and secret not in text


async def test_pass_through_counts_as_a_sign_of_life(rig: Rig) -> None:
    async with rig.gateway(), rig.host(), rig.http() as http, rig.http("") as osworld:
        lease = (await http.post("/v1/leases", json={"key": "k", "owner": "o", "ttl_s": 0.8})).json()
        for _ in range(5):
            await asyncio.sleep(0.3)
            reply = await osworld.get(f"/g/{lease['secret']}/server/screenshot")
            assert reply.status_code == 200
        assert EVENT_LOG
