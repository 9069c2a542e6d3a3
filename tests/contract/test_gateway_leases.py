"""What the gateway promises about leases, over HTTP, with fake desktops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_cluster.api import Requirements
from sandbox_cluster.providers.fake import EVENT_LOG
from slime_cua.core.actions import CodeAction
from slime_cua.core.errors import ConfigError, SandboxError
from slime_cua.core.types import Task
from tests.contract.gateway_rig import ALICE, BOB, CLICK, HOST, Rig, acquire_body, eventually


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
async def up(rig: Rig) -> AsyncIterator[Rig]:
    async with rig.gateway(), rig.host():
        yield rig


async def test_a_leased_desktop_steps_executes_and_gives_files(up: Rig) -> None:
    async with up.client() as client, client.lease(key="k", task_id="t", episode_id="e") as sandbox:
        shot = await sandbox.step([CLICK])
        assert (shot.width_px, shot.height_px) == (320, 200) and shot.png.startswith(b"\x89PNG")
        reply = await sandbox.execute(CodeAction(language="bash", code="echo hi"))
        assert (reply.stdout, reply.returncode) == ("hi\n", 0)
        assert b"Button" in await sandbox.read_file(EVENT_LOG)
        assert (await sandbox.screenshot()).png == shot.png


async def test_no_reply_waits_for_nagle(up: Rig) -> None:
    async with up.client() as client, client.lease(key="k") as sandbox:
        spent = []
        for _ in range(15):
            start = time.perf_counter()
            await sandbox.step([])
            spent.append(time.perf_counter() - start)
        assert min(spent) < 0.03


async def test_file_names_come_through_whole(up: Rig) -> None:
    async with up.client() as client, client.lease(key="k") as sandbox:
        name = "/home/user/a b+c%20\u00e9&d=?#.txt"
        files = [{"path": name, "content": "x"}]
        steps = ({"type": "upload_file", "parameters": {"files": files}},)
        await sandbox.setup(Task(id="t", instruction="-", config=steps))
        assert await sandbox.read_file(name) == b"x"


async def test_a_second_acquire_with_the_same_key_returns_the_same_lease(up: Rig) -> None:
    async with up.http() as http:
        first = (await http.post("/v1/leases", json=acquire_body())).json()
        second = (await http.post("/v1/leases", json=acquire_body())).json()
        assert first["lease_id"] == second["lease_id"] and first["secret"] == second["secret"]
        assert len((await http.get("/v1/leases")).json()) == 1


async def test_two_acquires_at_once_with_the_same_key_get_one_desktop(up: Rig) -> None:
    async with up.http() as http:
        replies = await asyncio.gather(*(http.post("/v1/leases", json=acquire_body()) for _ in range(5)))
        assert len({reply.json()["lease_id"] for reply in replies}) == 1
        assert len((await http.get("/v1/leases")).json()) == 1


async def test_keys_of_two_principals_do_not_meet(up: Rig) -> None:
    async with up.http(ALICE) as alice, up.http(BOB) as bob:
        first = (await alice.post("/v1/leases", json=acquire_body())).json()
        second = (await bob.post("/v1/leases", json=acquire_body())).json()
        assert first["lease_id"] != second["lease_id"]


async def test_a_key_whose_lease_has_ended_is_gone(up: Rig) -> None:
    async with up.http() as http:
        lease = (await http.post("/v1/leases", json=acquire_body())).json()
        assert (await http.delete(f"/v1/leases/{lease['lease_id']}")).status_code == 204
        reply = await http.post("/v1/leases", json=acquire_body())
        assert reply.status_code == 410 and "use a new key" in reply.json()["error"]["message"]


async def test_a_lease_is_usable_by_its_owner_only(up: Rig) -> None:
    async with up.client(ALICE) as client, client.lease(key="k") as sandbox, up.http(BOB) as bob:
        path = f"/v1/leases/{sandbox.lease.lease_id}"
        step = {"action_id": "a", "actions": []}
        for reply in (
            await bob.post(f"{path}/heartbeat"),
            await bob.post(f"{path}/step", json=step),
            await bob.get(f"{path}/screenshot"),
            await bob.delete(path),
        ):
            assert reply.status_code == 404
        assert (await bob.get("/v1/leases")).json() == []
        await sandbox.step([CLICK])


@pytest.mark.parametrize("token", ["", "wrong", HOST])
async def test_a_wrong_token_is_401_and_changes_nothing(up: Rig, token: str) -> None:
    async with up.client() as client, client.lease(key="k") as sandbox, up.http(token) as stranger:
        path = f"/v1/leases/{sandbox.lease.lease_id}"
        calls = [
            stranger.post("/v1/leases", json=acquire_body("other")),
            stranger.get("/v1/leases"),
            stranger.post(f"{path}/step", json={"action_id": "x", "actions": [CLICK.model_dump()]}),
            stranger.post(f"{path}/reset"),
            stranger.delete(path),
            stranger.get("/v1/hosts"),
            stranger.post("/v1/hosts/h1/drain"),
            stranger.get("/metrics"),
        ]
        assert {(await call).status_code for call in calls} == {401}
        assert await sandbox.read_file(EVENT_LOG) == b""


async def test_a_client_token_does_not_register_hosts(up: Rig) -> None:
    async with up.http(ALICE) as http:
        beat = {"epoch": "x", "num_ready": 0}
        assert (await http.post("/v1/hosts/h1/beat", json=beat)).status_code == 401


async def test_the_python_client_says_that_its_token_is_wrong(up: Rig) -> None:
    async with up.client("wrong") as client:
        with pytest.raises(ConfigError, match="token"):
            async with client.lease(key="k"):
                pass


async def test_those_who_wait_are_served_in_the_order_of_asking(rig: Rig) -> None:
    order: list[int] = []

    async def episode(number: int) -> None:
        async with client.lease(key=f"wait-{number}"):
            order.append(number)

    async with rig.gateway(), rig.host(slots=1), rig.client() as client:
        async with client.lease(key="a"):
            waiting = []
            for number in range(5):
                waiting.append(asyncio.create_task(episode(number)))
                await asyncio.sleep(0.05)
            assert order == []
        await asyncio.gather(*waiting)
    assert order == sorted(order)


async def test_a_full_pool_is_a_wait_and_at_the_deadline_a_sentence(up: Rig) -> None:
    async with up.client() as client, client.lease(key="a"), client.lease(key="b"):
        with pytest.raises(SandboxError, match=r"no desktop became free within .* 2 of 2 leased"):
            async with client.lease(key="c", timeout_s=0.5):
                pass


async def test_a_client_that_left_before_its_turn_gets_no_desktop(up: Rig) -> None:
    async with up.client() as client, up.http() as http:
        async with client.lease(key="a"), client.lease(key="b"):
            asking = asyncio.create_task(http.post("/v1/leases", json=acquire_body("left", deadline_s=30)))
            await asyncio.sleep(0.2)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await asyncio.sleep(0.2)
        async with client.lease(key="c"), client.lease(key="d"):
            views = (await http.get("/v1/leases")).json()
            assert len(views) == 2


async def test_requirements_choose_the_host_and_do_not_block_others(rig: Rig) -> None:
    async with (
        rig.gateway(),
        rig.host("small", slots=1),
        rig.host("large", slots=1, size=(640, 384), tags=("gpu",)),
    ):
        async with rig.client() as client:
            large = Requirements(screen_wh_px=(640, 384))
            async with client.lease(key="a", requirements=large) as first:
                assert first.lease.host_id == "large" and first.screen_wh_px == (640, 384)
                waiting = asyncio.create_task(
                    client.lease(key="b", requirements=large, timeout_s=0.6).__aenter__()
                )
                await asyncio.sleep(0.1)
                async with client.lease(key="c", timeout_s=5) as third:
                    assert third.lease.host_id == "small"
                with pytest.raises(SandboxError, match="no desktop became free"):
                    await waiting
            with pytest.raises(SandboxError, match="no host fits"):
                async with client.lease(key="d", requirements=Requirements(tags=("windows",)), timeout_s=0.3):
                    pass


async def test_a_lease_without_heartbeats_expires_and_its_desktop_is_ended(rig: Rig) -> None:
    async with rig.gateway(), rig.host(slots=1, spares=0) as machine, rig.http() as http:
        lease = (await http.post("/v1/leases", json=acquire_body(ttl_s=0.5))).json()
        driver = machine.provider.drivers[0]
        assert driver.is_alive
        await eventually(lambda: not driver.is_alive)
        reply = await http.post(f"/v1/leases/{lease['lease_id']}/heartbeat")
        assert reply.status_code == 410 and "expired" in reply.json()["error"]["message"]
        other = await http.post("/v1/leases", json=acquire_body("next"))
        assert other.status_code == 200


async def test_heartbeats_keep_a_lease_that_does_nothing(rig: Rig) -> None:
    async with rig.gateway(), rig.host(), rig.client(ttl_s=0.6) as client, client.lease(key="k") as sandbox:
        await asyncio.sleep(1.5)
        await sandbox.step([CLICK])
        assert sandbox.ended is None


async def test_a_desktop_is_used_once(rig: Rig) -> None:
    async with rig.gateway(), rig.host(slots=1, spares=1) as machine, rig.client() as client:
        async with client.lease(key="a") as sandbox:
            await sandbox.execute(CodeAction(language="bash", code="echo secret > /home/user/mine"))
            first = [one for one in machine.provider.drivers.values() if "/home/user/mine" in one.files]
        async with client.lease(key="b") as sandbox:
            with pytest.raises(SandboxError, match="not_found"):
                await sandbox.read_file("/home/user/mine")
        await eventually(lambda: not first[0].is_alive)


async def test_a_reset_gives_a_fresh_desktop_under_the_same_lease(up: Rig) -> None:
    async with up.client() as client, client.lease(key="k") as sandbox:
        lease_id = sandbox.lease.lease_id
        await sandbox.step([CLICK], "a")
        await sandbox.reset()
        assert sandbox.lease.lease_id == lease_id and await sandbox.read_file(EVENT_LOG) == b""
        with pytest.raises(SandboxError, match="not run again"):
            await sandbox.step([CLICK], "a")
        assert await sandbox.read_file(EVENT_LOG) == b""


async def test_a_draining_host_gets_no_new_lease_and_keeps_its_old(rig: Rig) -> None:
    async with rig.gateway(), rig.host("h1", slots=2), rig.client() as client, rig.http() as http:
        async with client.lease(key="a") as sandbox:
            assert (await http.post("/v1/hosts/h1/drain")).json()["state"] == "draining"
            with pytest.raises(SandboxError, match="h1 is draining"):
                async with client.lease(key="b", timeout_s=0.4):
                    pass
            await sandbox.step([CLICK])


async def test_health_metrics_and_openapi_are_there_and_hold_no_secret(up: Rig) -> None:
    async with up.client() as client, client.lease(key="k") as sandbox, up.http() as http:
        assert (await http.get("/healthz")).json()["status"] == "ok"
        metrics = (await http.get("/metrics")).text
        assert 'sandbox_leases{state="live"} 1.0' in metrics and sandbox.lease.secret not in metrics
        paths = (await http.get("/openapi.json")).json()["paths"]
        assert "/v1/leases/{lease_id}/step" in paths
        assert sandbox.lease.secret not in (await http.get("/v1/leases")).text
