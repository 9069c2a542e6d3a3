"""What set-up steps get of the host: less time than the set-up has, and the password of its desktops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from sandbox_cluster.api import BindRequest
from sandbox_cluster.host.service import assemble
from sandbox_cluster.judge.jail import Jail
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.fake import FakeProvider
from sandbox_cluster.tasks.setup import Setup
from slime_cua.config.sandbox import DesktopConfig, SandboxConfig
from slime_cua.core.errors import SandboxError


@pytest.fixture
async def desktop(tmp_path: Path) -> AsyncIterator[Desktop]:
    provider = FakeProvider(DesktopConfig(screen_wh_px=(64, 64)), tmp_path, "setup")
    yield await provider.boot(0)
    await provider.close()


async def test_a_command_is_ended_before_the_set_up_is_and_so_says_what_hung(desktop: Desktop) -> None:
    """With the same deadline outside the command would be left running, and the set-up would say that it did not end."""
    hangs = {"type": "execute", "parameters": {"command": "sleep 30"}}
    with pytest.raises(SandboxError, match=r"step 0 \(execute\) failed: the command did not end within"):
        await Setup(lambda _: None).run(desktop, [hangs], 2.0)


async def test_steps_are_given_the_password_that_the_config_has(tmp_path: Path) -> None:
    config = SandboxConfig(
        provider="fake", screen_wh_px=(64, 64), client_password="another", num_desktops=1, num_spares=0
    )
    provider = FakeProvider(config, tmp_path, "h")
    nobody = "http://127.0.0.1:9"
    host = assemble(
        config, provider, Jail(), gateway_url=nobody, host_token="t", host_id="h", url=nobody, disk=tmp_path
    )
    command = "echo {CLIENT_PASSWORD} > /home/user/said"
    body = {"config": [{"type": "execute", "parameters": {"command": command, "shell": True}}]}
    async with host:
        await host.bindings.bind("l", BindRequest())
        headers = {"authorization": f"Bearer {host.agent._registration.call_token}"}
        transport = httpx.ASGITransport(app=host.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://h", headers=headers) as http:
            reply = await http.post("/v1/leases/l/setup", json=body)
        assert reply.status_code == 200, reply.text
        assert provider.drivers[0].files["/home/user/said"] == b"another\n"
