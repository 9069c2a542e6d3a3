"""A gateway and hosts with fake desktops in one event loop, spoken to over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from sandbox_cluster.client import SandboxClient
from sandbox_cluster.gateway.app import create_app
from sandbox_cluster.gateway.state import State
from sandbox_cluster.host.service import Host, assemble
from sandbox_cluster.judge.jail import Jail
from sandbox_cluster.providers.fake import FakeProvider
from sandbox_cluster.serving import Tokens, bind, running
from slime_cua.config.sandbox import SandboxConfig
from slime_cua.core.actions import GuiAction
from slime_cua.core.coordinates import Point

SIZE = (320, 200)
CLICK = GuiAction(kind="left_click", point=Point(x=500, y=500))
ALICE, BOB, HOST = "token-of-alice", "token-of-bob", "token-of-hosts"


@dataclass
class Machine:
    """A host agent and the provider under it."""

    host: Host
    provider: FakeProvider
    talk: asyncio.Task[None]
    """Its talk with the gateway; cancel it and the host falls silent."""


@dataclass
class Rig:
    folder: Path
    host_timeout_s: float = 10.0
    max_body_mb: int = 512
    url: str = ""

    @contextlib.asynccontextmanager
    async def gateway(self, port: int = 0) -> AsyncIterator[Any]:
        sock = bind("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        clients, hosts = Tokens({"alice": ALICE, "bob": BOB}), Tokens({"hosts": HOST})
        app = create_app(
            State(self.folder / "state"),
            clients,
            hosts,
            host_timeout_s=self.host_timeout_s,
            max_body_mb=self.max_body_mb,
        )
        async with running(app, sock):
            yield app.state.gateway
        sock.close()

    @contextlib.asynccontextmanager
    async def host(
        self,
        host_id: str = "h1",
        slots: int = 2,
        spares: int = 1,
        size: tuple[int, int] = SIZE,
        tags: tuple[str, ...] = (),
        os: Literal["ubuntu", "windows"] = "ubuntu",
        **health: float,
    ) -> AsyncIterator[Machine]:
        config = SandboxConfig(
            provider="fake",
            num_desktops=slots,
            num_spares=spares,
            screen_wh_px=size,
            os=os,
            max_body_mb=self.max_body_mb,
        )
        provider = FakeProvider(config, self.folder, host_id)
        sock = bind("127.0.0.1", 0)
        host = assemble(
            config,
            provider,
            Jail(),
            gateway_url=self.url,
            host_token=HOST,
            host_id=host_id,
            tags=tags,
            url=f"http://127.0.0.1:{sock.getsockname()[1]}",
            disk=self.folder,
            **health,
        )
        async with host, running(host.app, sock):
            talk = asyncio.create_task(host.agent.run())
            await host.agent.registered.wait()
            try:
                yield Machine(host, provider, talk)
            finally:
                talk.cancel()
                await asyncio.gather(talk, return_exceptions=True)
        sock.close()

    def client(self, token: str = ALICE, ttl_s: float = 30.0, **config: Any) -> SandboxClient:
        settings: dict[str, Any] = {"screen_wh_px": SIZE, "settle_max_ms": 0, "settle_quiet_ms": 0, **config}
        return SandboxClient(self.url, token, SandboxConfig(**settings), owner="tests", ttl_s=ttl_s)

    def http(self, token: str = ALICE) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, trust_env=False)


async def eventually(claim: Any, timeout_s: float = 5.0) -> None:
    """Wait until claim() holds; the assertion fails otherwise."""
    for _ in range(int(timeout_s / 0.02)):
        if claim():
            return
        await asyncio.sleep(0.02)
    assert claim()


def acquire_body(key: str = "k", **more: Any) -> dict[str, Any]:
    return {"key": key, "owner": "tests", **more}
