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
import sys
import tempfile
import time
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

from bench_tables import START_S, Row, Table, at_least, at_most

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


def quantile_ms(seconds: list[float], percent: int) -> float:
    return statistics.quantiles(seconds, n=100)[percent - 1] * 1e3


async def bench_added(
    ways: Ways, sandboxes: list[Sandbox], pid: int, options: argparse.Namespace
) -> list[Row]:
    """What a step costs through the gateway and straight to the host, at the same moments."""
    before_s = cpu_s(pid)
    spent = await paced(ways, sandboxes, options.rate, options.seconds)
    gateway_ms = (cpu_s(pid) - before_s) / len(spent[False]) * 1e3
    rows = [Row(f"gateway CPU a step at {options.rate:g} steps/s", f"{gateway_ms:.2f} ms")]
    for percent, most_ms in ((50, 2.0), (99, 10.0)):
        through, straight = quantile_ms(spent[False], percent), quantile_ms(spent[True], percent)
        detail = f" ({through:.2f} less {straight:.2f})"
        name = f"the gateway adds to a step at {options.rate:g} steps/s, p{percent}"
        rows.append(at_most(name, through - straight, most_ms, "ms", detail))
    return rows


async def bench_flat_out(
    ways: Ways, sandboxes: list[Sandbox], pids: dict[str, int], seconds: float
) -> list[Row]:
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    own_s = time.process_time()
    rate = await flat_out(ways, sandboxes, seconds)
    spent = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    spent["client"] = time.process_time() - own_s
    each = ", ".join(f"{name} {cpu / (rate * seconds) * 1e3:.2f}" for name, cpu in spent.items())
    busy = f"; CPU ms a step: {each}; {sum(spent.values()) / seconds:.1f} of {os.cpu_count()} cores had"
    return [at_least("steps through the gateway, all desktops at once", rate, 300, "a second", busy)]


async def bench_memory(
    ways: Ways, sandboxes: list[Sandbox], pid: int, options: argparse.Namespace
) -> list[Row]:
    """The gateway's memory under steady work, seen every half minute, or four times where that is more."""
    num_looks = max(4, round(2 * options.minutes))
    before_mb, seen = rss_mb(pid), []
    for _ in range(num_looks):
        await paced(ways, sandboxes, options.rate, 60 * options.minutes / num_looks)
        seen.append(rss_mb(pid))
        print(
            f"gateway memory, look {len(seen)} of {num_looks}: {seen[-1]:.2f} MB", file=sys.stderr, flush=True
        )
    half = num_looks // 2
    growth_mb = statistics.mean(seen[half:]) - statistics.mean(seen[:half])
    name = f"gateway memory over {options.minutes:g} minutes: second half less first half"
    return [at_most(name, growth_mb, 2.0, "MB", f" ({before_mb:.0f} MB at first, {seen[-1]:.0f} MB at last)")]


async def run(options: argparse.Namespace) -> int:
    config = SandboxConfig(
        provider="fake", num_desktops=options.desktops, num_spares=1, max_boots=8, screen_wh_px=(640, 384)
    )
    table = Table(
        f"{options.desktops} leased fake desktops of 640x384, gateway, host and client on one machine"
    )
    with tempfile.TemporaryDirectory() as folder:
        async with (
            LocalCluster(config, Path(folder), start_timeout_s=START_S) as cluster,
            AsyncExitStack() as stack,
        ):
            assert cluster.gateway and cluster.host
            pid = cluster.gateway.process.pid
            client = await stack.enter_async_context(SandboxClient(cluster.url, cluster.token, config))
            start = time.perf_counter()
            leases = [client.lease(key=f"bench-{number}") for number in range(options.desktops)]
            sandboxes = [await stack.enter_async_context(lease) for lease in leases]
            acquire_ms = (time.perf_counter() - start) / len(sandboxes) * 1e3
            ways = Ways(cluster, registration(Path(folder)))
            stack.push_async_callback(ways.close)
            await flat_out(ways, sandboxes, 2.0)
            table.add([Row("acquire, one after another", f"{acquire_ms:.1f} ms each")])
            await table.part("what the gateway adds", bench_added(ways, sandboxes, pid, options))
            pids = {"gateway": pid, "host": cluster.host.process.pid}
            await table.part("steps a second", bench_flat_out(ways, sandboxes, pids, options.seconds / 2))
            if options.minutes:
                memory = bench_memory(ways, sandboxes, pid, options)
                await table.part("gateway memory", memory, 120 * options.minutes + 60)
    return table.end()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--desktops", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--rate", type=float, default=100.0, help="steps started a second, both ways together"
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="watch the memory for so long at that rate"
    )
    raise SystemExit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
