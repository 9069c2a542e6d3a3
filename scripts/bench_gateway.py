"""What the gateway adds to an action: the same steps through it and straight to the host, with fake desktops. Prints Markdown.

    PYTHONPATH=. python scripts/bench_gateway.py --desktops 128 --seconds 20 --rate 100

Gateway, host and this client share the machine, so figures are for all three together.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import statistics
import tempfile
import time
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

from sandbox_cluster.api import HostRegistration, Settle, StepRequest
from sandbox_cluster.client import Sandbox, SandboxClient
from sandbox_cluster.cluster import LocalCluster
from sandbox_cluster.wire import Wire
from slime_cua.config.sandbox import SandboxConfig
from slime_cua.core.actions import GuiAction
from slime_cua.core.coordinates import Point

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
MOVE = GuiAction(kind="mouse_move", point=Point(x=500, y=500))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def registration(state: Path) -> HostRegistration:
    with sqlite3.connect(state / "gateway" / "gateway.sqlite") as db:
        [(body,)] = db.execute("SELECT body FROM hosts")
    return HostRegistration.model_validate_json(body)


class Ways:
    """The two ways of one step."""

    def __init__(self, cluster: LocalCluster, host: HostRegistration) -> None:
        self._wire = Wire()
        self._gateway = (cluster.url, {"authorization": f"Bearer {cluster.token}"})
        self._host = (host.url, {"authorization": f"Bearer {host.call_token}"})

    async def step(self, sandbox: Sandbox, is_direct: bool) -> float:
        """Seconds of one step."""
        url, headers = self._host if is_direct else self._gateway
        body = StepRequest(action_id=uuid.uuid4().hex, actions=(MOVE,), settle=Settle(quiet_ms=0, max_ms=0))
        start = time.perf_counter()
        reply = await self._wire.request(
            "POST",
            f"{url}/v1/leases/{sandbox.lease.lease_id}/step",
            body.model_dump_json().encode(),
            {**headers, "content-type": "application/json"},
            30.0,
        )
        assert reply.status == 200, reply.content
        return time.perf_counter() - start

    async def close(self) -> None:
        await self._wire.close()


async def paced(ways: Ways, sandboxes: list[Sandbox], rate: float, seconds: float) -> dict[bool, list[float]]:
    """Latencies of steps started at `rate` a second, every second one straight to the host."""
    spent: dict[bool, list[float]] = {False: [], True: []}

    async def one(number: int) -> None:
        is_direct = number % 2 == 1
        spent[is_direct].append(await ways.step(sandboxes[number // 2 % len(sandboxes)], is_direct))

    start, tasks = time.perf_counter(), []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
        tasks.append(asyncio.ensure_future(one(number)))
    await asyncio.gather(*tasks)
    return spent


async def flat_out(ways: Ways, sandboxes: list[Sandbox], seconds: float) -> float:
    """Steps a second through the gateway when every desktop acts without pause."""
    end, count = time.perf_counter() + seconds, 0

    async def one(sandbox: Sandbox) -> None:
        nonlocal count
        while time.perf_counter() < end:
            await ways.step(sandbox, is_direct=False)
            count += 1

    start = time.perf_counter()
    await asyncio.gather(*(one(sandbox) for sandbox in sandboxes))
    return count / (time.perf_counter() - start)


def row(name: str, value: str) -> None:
    print(f"| {name} | {value} |")


def quantiles(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return f"{cuts[49] * 1e3:.2f} / {cuts[98] * 1e3:.2f} ms"


async def run(options: argparse.Namespace) -> None:
    config = SandboxConfig(
        provider="fake", num_desktops=options.desktops, num_spares=1, max_boots=8, screen_wh_px=(640, 384)
    )
    with tempfile.TemporaryDirectory() as folder:
        async with LocalCluster(config, Path(folder)) as cluster, AsyncExitStack() as stack:
            assert cluster.gateway
            pid = cluster.gateway.process.pid
            client = await stack.enter_async_context(SandboxClient(cluster.url, cluster.token, config))
            start = time.perf_counter()
            leases = [client.lease(key=f"bench-{number}") for number in range(options.desktops)]
            sandboxes = [await stack.enter_async_context(lease) for lease in leases]
            acquire_ms = (time.perf_counter() - start) / len(sandboxes) * 1e3
            ways = Ways(cluster, registration(Path(folder)))
            stack.push_async_callback(ways.close)
            await flat_out(ways, sandboxes, 2.0)
            before_mb, before_s = rss_mb(pid), cpu_s(pid)
            spent = await paced(ways, sandboxes, options.rate, options.seconds)
            gateway_ms = (cpu_s(pid) - before_s) / len(spent[False]) * 1e3
            rate = await flat_out(ways, sandboxes, options.seconds / 2)
            print(f"| {options.desktops} fake desktops, {os.cpu_count()} cores | |\n|---|---|")
            row("acquire, one after another", f"{acquire_ms:.1f} ms each")
            row(f"step through the gateway, {options.rate:g} steps/s, p50 / p99", quantiles(spent[False]))
            row("step straight to the host, the same moments, p50 / p99", quantiles(spent[True]))
            row("gateway CPU a step", f"{gateway_ms:.2f} ms")
            row("steps a second, all desktops at once", f"{rate:.0f}")
            row("gateway RSS before / after", f"{before_mb:.0f} / {rss_mb(pid):.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--desktops", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--rate", type=float, default=100.0, help="steps started a second, both ways together"
    )
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
