"""What set-up steps get of the host: less time than the set-up has, and the password of its desktops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from sandbox_cluster.api import BindRequest, ExecuteReply
from sandbox_cluster.deadlines import tighter
from sandbox_cluster.host.service import assemble
from sandbox_cluster.judge.jail import Jail
from sandbox_cluster.providers.fake import FakeProvider
from sandbox_cluster.tasks.setup import Setup
from slime_cua.config.sandbox import SandboxConfig


class Noting:
    """A desktop as far as a command needs one: it notes how long it may run."""

    screen_wh_px = (64, 64)
    timeout_s = 0.0

    async def run(self, command: object, is_shell: bool, timeout_s: float) -> ExecuteReply:
        self.timeout_s = timeout_s
        return ExecuteReply(stdout="", stderr="", returncode=0)


async def test_a_command_has_less_time_than_the_set_up_so_that_it_is_ended_and_named_before() -> None:
    desktop: Any = Noting()
    command = {"type": "execute", "parameters": {"command": "true"}}
    await Setup(lambda _: None).run(desktop, [command], 20.0)
    assert 0 < desktop.timeout_s <= tighter(20.0) < 20.0


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
