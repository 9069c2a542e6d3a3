"""A run with fewer desktops than episodes, after the loss of a host say, is slow and not wrong; with none it says so. Tasks
get desktops of their own system."""

import asyncio

import pytest

from slime_cua.config.sandbox import SandboxConfig
from slime_cua.core.errors import SandboxError
from slime_cua.core.types import Task
from slime_cua.launch.desktops import GatewayDesktops
from tests.contract.gateway_rig import ALICE, SIZE, Rig

TASK = Task(id="t", instruction="")


def desktops_of(rig, acquire_timeout_s):
    config = SandboxConfig(
        provider="fake", num_desktops=2, screen_wh_px=SIZE, acquire_timeout_s=acquire_timeout_s
    )
    return GatewayDesktops(rig.url, ALICE, config)


async def test_an_episode_queues_again_while_another_has_the_only_desktop(tmp_path):
    rig, order, has_one = Rig(tmp_path), [], asyncio.Event()
    async with rig.gateway(), rig.host(slots=1, spares=0):
        desktops = desktops_of(rig, acquire_timeout_s=2.0)

        async def play(name, seconds):
            async with desktops.lease(TASK, name):
                order.append(name)
                has_one.set()
                await asyncio.sleep(seconds)

        async with asyncio.timeout(60):
            first = asyncio.create_task(play("first", 4.5))
            await has_one.wait()
            await asyncio.gather(first, play("second", 0.0))
        await desktops.close()
    assert order == ["first", "second"], "the second waited more than twice acquire_timeout_s"


async def test_without_any_desktop_the_wait_ends_with_a_sentence(tmp_path):
    rig = Rig(tmp_path)
    async with rig.gateway():
        desktops = desktops_of(rig, acquire_timeout_s=0.3)
        with pytest.raises(SandboxError, match=r"no desktop became free within 0\.\d+ s"):
            async with asyncio.timeout(60), desktops.lease(TASK, "e"):
                pass
        await desktops.close()


async def test_a_windows_task_waits_for_a_windows_desktop_and_gets_no_other(tmp_path):
    rig = Rig(tmp_path)
    windows = TASK.model_copy(update={"metadata": {"os": "windows"}})
    async with rig.gateway(), rig.host("linux", slots=2), asyncio.timeout(60):
        desktops = desktops_of(rig, acquire_timeout_s=0.5)
        with pytest.raises(SandboxError, match=r"no host fits the requirements .*'windows'"):
            async with desktops.lease(windows, "too early"):
                pass
        async with rig.host("win", slots=2, os="windows"):
            async with desktops.lease(windows, "e1") as there, desktops.lease(TASK, "e2") as here:
                assert (there.lease.host_id, here.lease.host_id) == ("win", "linux")
        await desktops.close()
