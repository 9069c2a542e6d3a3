"""Faults between client, gateway, host and desktop: nothing acts twice, nothing leaks, nothing becomes a score."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from pathlib import Path

import httpx
import pytest
from PIL import Image

from sandbox_cluster.providers.fake import EVENT_LOG
from slime_cua.core.actions import CodeAction, GuiAction
from slime_cua.core.errors import SandboxError, TaskError, UnknownOutcomeError
from slime_cua.core.types import Task
from tests.contract.gateway_rig import ALICE, CLICK, Machine, Rig, acquire_body, eventually

JUDGE = "def call_rule_judge_1(result, expected):\n    return 1.0"
EVALUATOR = {
    "judges": [{"result_getter": {"type": "vm_file", "path": "/x"}, "expected_getter": None, "code": JUDGE}]
}


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, host_timeout_s=60.0)


def num_events(driver_files: dict[str, bytes]) -> int:
    return len(driver_files[EVENT_LOG].splitlines())


async def test_an_action_id_acts_once_and_replays_the_first_result(rig: Rig) -> None:
    async with rig.gateway(), rig.host(slots=1, spares=0) as machine, rig.client() as client:
        async with client.lease(key="k") as sandbox:
            first, *others = await asyncio.gather(*(sandbox.step([CLICK], "a") for _ in range(4)))
            once = num_events(machine.provider.drivers[0].files)
            again = await sandbox.step([CLICK], "a")
            assert (
                again.is_replay
                and again.png == first.png
                and not all(one.is_replay for one in (first, *others))
            )
            code = CodeAction(language="bash", code="echo x >> /home/user/count")
            assert (
                not (await sandbox.execute(code, "b")).is_replay
                and (await sandbox.execute(code, "b")).is_replay
            )
            assert await sandbox.read_file("/home/user/count") == b"x\n"
            assert num_events(machine.provider.drivers[0].files) == once


async def test_an_action_id_with_another_action_is_refused(rig: Rig) -> None:
    async with rig.gateway(), rig.host(), rig.client() as client, client.lease(key="k") as sandbox:
        await sandbox.step([CLICK], "a")
        with pytest.raises(SandboxError, match="fresh id"):
            await sandbox.step([CLICK, CLICK], "a")


async def test_a_step_past_its_deadline_is_an_unknown_outcome_and_the_desktop_is_ended(rig: Rig) -> None:
    async with (
        rig.gateway(),
        rig.host(slots=1, spares=0) as machine,
        rig.client(step_timeout_s=1.5) as client,
    ):
        async with client.lease(key="k") as sandbox:
            driver = machine.provider.drivers[0]
            machine.provider.faults.latency_s = 5.0
            with pytest.raises(UnknownOutcomeError, match="may have"):
                await sandbox.step([CLICK], "a")
            machine.provider.faults.latency_s = 0.0
            await eventually(lambda: not driver.is_alive)
            await asyncio.sleep(0.3)
            with pytest.raises(SandboxError, match="gone"):
                await sandbox.step([CLICK], "b")


async def test_a_reply_lost_on_the_way_is_an_unknown_outcome_and_is_not_sent_again(rig: Rig) -> None:
    async with rig.gateway(), rig.host(slots=1, spares=0) as machine, rig.client() as client:
        async with client.lease(key="k") as sandbox:
            driver = machine.provider.drivers[0]
            async with _CuttingProxy(rig.url) as url:
                cut = Rig(rig.folder, url=url).client()
                sandbox_cut = type(sandbox)(cut, sandbox.lease)
                with pytest.raises(UnknownOutcomeError, match="lost"):
                    await sandbox_cut.step([CLICK], "a")
                await cut.close()
            once = num_events(driver.files)
            assert once > 0
            assert (await sandbox.step([CLICK], "a")).is_replay and num_events(driver.files) == once


async def _cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    """Pass the request on, take the reply, close without giving it."""
    there, to_there = await asyncio.open_connection(host, port)
    to_there.write(await reader.read(1 << 20))
    while not (await there.read(1 << 20)):
        pass
    to_there.close()
    writer.close()


class _CuttingProxy:
    def __init__(self, url: str) -> None:
        self._target = httpx.URL(url)

    async def __aenter__(self) -> str:
        host, port = self._target.host, self._target.port or 80
        self._server = await asyncio.start_server(lambda r, w: _cut(r, w, host, port), "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()


async def test_a_desktop_that_dies_costs_its_lease_and_no_other(rig: Rig) -> None:
    async with rig.gateway(), rig.host(slots=2) as machine, rig.client() as client:
        async with client.lease(key="a") as first, client.lease(key="b") as second:
            machine.provider.faults.num_deaths = 1
            with pytest.raises(SandboxError):
                await first.step([CLICK])
            reply = await second.step([CLICK])
            assert reply.png
            with pytest.raises(SandboxError, match="gone"):
                await first.screenshot()
        async with client.lease(key="c") as third:
            await third.step([CLICK])


async def test_a_desktop_that_died_while_judged_gives_no_score(rig: Rig) -> None:
    async with rig.gateway(), rig.host(slots=1) as machine, rig.client() as client:
        async with client.lease(key="a") as sandbox:
            assert (await sandbox.evaluate(EVALUATOR)).score == 1.0
            for driver in machine.provider.drivers.values():
                await driver.kill()
            reply = None
            with contextlib.suppress(SandboxError):
                reply = await sandbox.evaluate(EVALUATOR)
            assert reply is None or (reply.score is None and reply.invalid_reason)


async def test_a_broken_screenshot_never_reaches_the_caller(rig: Rig) -> None:
    async with rig.gateway(), rig.host(slots=1) as machine, rig.client() as client:
        async with client.lease(key="a") as sandbox:
            machine.provider.faults.num_broken_screenshots = 50
            with pytest.raises(SandboxError):
                await sandbox.step([CLICK])


async def test_one_broken_screenshot_is_taken_again_without_a_second_action(rig: Rig) -> None:
    async with rig.gateway(), rig.host(slots=1, spares=0) as machine, rig.client() as client:
        async with client.lease(key="a") as sandbox:
            machine.provider.faults.num_broken_screenshots = 1
            mended = await sandbox.step([CLICK], "a")
            once = num_events(machine.provider.drivers[0].files)
            assert (await sandbox.step([CLICK], "a")).png == mended.png
            assert num_events(machine.provider.drivers[0].files) == once


async def test_a_long_wait_is_not_taken_for_a_dead_desktop(rig: Rig) -> None:
    async with (
        rig.gateway(),
        rig.host(slots=1, health_interval_s=0.2, look_timeout_s=0.2),
        rig.client() as client,
    ):
        async with client.lease(key="a") as sandbox:
            await sandbox.step([GuiAction(kind="wait", time_s=2.5)])
            await sandbox.step([CLICK])


async def test_a_wait_is_not_counted_against_the_steps_deadline(rig: Rig) -> None:
    async with rig.gateway(), rig.host(slots=1), rig.client(step_timeout_s=1.5) as client:
        async with client.lease(key="a") as sandbox:
            assert (await sandbox.step([GuiAction(kind="wait", time_s=2.0)])).png


async def test_a_desktop_that_answers_no_look_is_given_up(rig: Rig) -> None:
    async with rig.gateway(), rig.host(slots=1, health_interval_s=0.2, look_timeout_s=0.2) as machine:
        async with rig.client() as client, client.lease(key="a") as sandbox:
            machine.provider.faults.latency_s = 1.0
            await eventually(lambda: machine.host.bindings.lease_ids == (), 8.0)
            machine.provider.faults.latency_s = 0.0
            with pytest.raises(SandboxError, match="gone"):
                await sandbox.step([CLICK])


async def test_failed_boots_are_tried_again_in_the_background(rig: Rig) -> None:
    async with rig.gateway(), rig.host(slots=1, spares=0) as machine, rig.client() as client:
        machine.provider.faults.num_failing_boots = 2
        async with client.lease(key="a", timeout_s=10) as sandbox:
            await sandbox.step([CLICK])


async def test_a_host_whose_boots_all_fail_says_why(rig: Rig) -> None:
    async with rig.gateway(), rig.host(slots=1, spares=0) as machine, rig.client() as client:
        machine.provider.faults.num_failing_boots = 1000
        with pytest.raises(SandboxError, match="did not boot"):
            async with client.lease(key="a", timeout_s=8):
                pass


async def test_a_silent_host_costs_its_own_leases_and_nothing_else(rig: Rig) -> None:
    rig.host_timeout_s = 1.5
    async with (
        rig.gateway(),
        rig.host("h1", slots=1) as lost,
        rig.host("h2", slots=1),
        rig.client() as client,
    ):
        async with client.lease(key="a") as first, client.lease(key="b") as second:
            on_lost, on_other = (first, second) if first.lease.host_id == "h1" else (second, first)
            lost.talk.cancel()
            await asyncio.sleep(2.2)
            with pytest.raises(SandboxError, match="h1 is lost"):
                await on_lost.step([CLICK])
            await on_other.step([CLICK])


async def test_a_restarted_host_gets_new_leases_and_its_old_ones_are_over(rig: Rig) -> None:
    async with rig.gateway(), rig.client() as client:
        async with rig.host("h1", slots=1) as machine:
            lease = client.lease(key="a")
            sandbox = await lease.__aenter__()
            machine.talk.cancel()
        async with rig.host("h1", slots=1):
            with pytest.raises(SandboxError, match="gone"):
                await sandbox.step([CLICK])
            async with client.lease(key="b") as fresh:
                await fresh.step([CLICK])
        await lease.__aexit__(None, None, None)


async def test_leases_survive_a_restart_of_the_gateway(rig: Rig) -> None:
    async with rig.gateway() as gateway:
        port = int(rig.url.rsplit(":", 1)[1])
        host = rig.host("h1", slots=2)
        machine = await host.__aenter__()
        async with rig.http() as http:
            lease = (await http.post("/v1/leases", json=acquire_body("a"))).json()
            ended = (await http.post("/v1/leases", json=acquire_body("b"))).json()
            await http.delete(f"/v1/leases/{ended['lease_id']}")
        assert gateway.broker.leases.by_id[lease["lease_id"]].state == "live"
    async with rig.gateway(port), rig.http() as http:
        path = f"/v1/leases/{lease['lease_id']}"
        assert (
            await http.post(f"{path}/step", json={"action_id": "a", "actions": [CLICK.model_dump()]})
        ).status_code == 200
        assert (await http.post("/v1/leases", json=acquire_body("a"))).json()["secret"] == lease["secret"]
        assert (await http.post(f"/v1/leases/{ended['lease_id']}/heartbeat")).status_code == 410
        assert [view["lease_id"] for view in (await http.get("/v1/leases")).json()] == [lease["lease_id"]]
        assert len(machine.host.bindings.lease_ids) == 1
        await host.__aexit__(None, None, None)


async def test_a_lease_whose_client_died_with_the_gateway_is_reaped_after_its_ttl(rig: Rig) -> None:
    async with rig.gateway():
        port = int(rig.url.rsplit(":", 1)[1])
        host = rig.host("h1", slots=1, spares=0)
        machine = await host.__aenter__()
        async with rig.http() as http:
            await http.post("/v1/leases", json=acquire_body("a", ttl_s=6.0))
    async with rig.gateway(port), rig.http() as http:
        assert len((await http.get("/v1/leases")).json()) == 1
        await eventually(lambda: machine.host.bindings.lease_ids == (), 60.0)
        assert (await http.get("/v1/leases")).json() == []
        await host.__aexit__(None, None, None)


async def test_a_bad_set_up_step_is_named_and_a_failed_one_is_infrastructure(rig: Rig) -> None:
    async with rig.gateway(), rig.host(), rig.client() as client, client.lease(key="k") as sandbox:
        bad = Task(id="t", instruction="x", config=({"type": "fly", "parameters": {}},))
        with pytest.raises(TaskError, match=r"step 0.*'fly' is unknown; this build has"):
            await sandbox.setup(bad)
        never = {
            "type": "execute",
            "parameters": {"command": "false", "shell": True, "until": {"returncode": 0}},
        }
        with pytest.raises(SandboxError, match=r"step 0 .execute. failed"):
            await sandbox.setup(Task(id="t", instruction="x", config=(never,)))


async def test_a_bad_body_is_400_and_names_the_field(rig: Rig) -> None:
    async with rig.gateway(), rig.host(), rig.http(ALICE) as http:
        reply = await http.post("/v1/leases", json={"key": "k", "owner": "o", "colour": "red"})
        assert reply.status_code == 400 and "colour" in reply.json()["error"]["message"]
        lease = (await http.post("/v1/leases", json=acquire_body())).json()
        reply = await http.post(f"/v1/leases/{lease['lease_id']}/step", json={"actions": []})
        assert reply.status_code == 400 and "action_id" in reply.json()["error"]["message"]


async def test_a_hung_capture_is_tried_once_more_without_a_second_action(rig: Rig) -> None:
    """Case R45: each layer's limit is smaller than its caller's."""
    async with rig.gateway(), rig.host(spares=0) as machine, rig.client() as client:
        async with client.lease(key="k") as sandbox:
            hurry(machine, 0.3)
            machine.provider.faults.num_hung_screenshots = 1
            await sandbox.step([CLICK])
            assert (await sandbox.read_file(EVENT_LOG)).count(b"Button(number=1, is_down=True)") == 1


async def test_a_capture_that_hangs_twice_ends_the_desktop_and_not_the_clients_patience(rig: Rig) -> None:
    async with rig.gateway(), rig.host(spares=0) as machine, rig.client() as client:
        with pytest.raises(SandboxError):
            async with client.lease(key="k") as sandbox:
                hurry(machine, 0.3)
                machine.provider.faults.num_hung_screenshots = 2
                started = time.monotonic()
                with pytest.raises(SandboxError, match=r"no screenshot within 0\.3 s"):
                    await sandbox.step([CLICK])
                assert time.monotonic() - started < 25
                await sandbox.step([CLICK])


async def test_black_screens_are_looked_at_again_counted_when_they_stay_and_kept(rig: Rig) -> None:
    async with rig.gateway(), rig.host(spares=0) as machine, rig.client() as client, rig.http() as http:
        async with client.lease(key="k") as sandbox:
            machine.provider.faults.num_black_screenshots = 1
            assert any(
                Image.open(io.BytesIO((await sandbox.step([CLICK])).png)).convert("RGB").getpixel((0, 0))
            )
            machine.provider.faults.num_black_screenshots = 2
            shot = await sandbox.step([CLICK])
            assert Image.open(io.BytesIO(shot.png)).convert("RGB").getpixel((0, 0)) == (0, 0, 0)
            machine.host.agent.news.set()
            for _ in range(100):
                text = (await http.get("/metrics")).text
                if "sandbox_black_captures 1.0" in text:
                    break
                await asyncio.sleep(0.05)
            assert "sandbox_black_captures 1.0" in text


def hurry(machine: Machine, capture_timeout_s: float) -> None:
    """Captures of the desktops that are there now get so long."""
    for watched in machine.host.pool._taken.values():
        watched.desktop._capture_timeout_s = capture_timeout_s
