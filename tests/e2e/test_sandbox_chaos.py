"""Seeded chaos over gateway, host, desktops, judges, clients and the wires between them.

At the end: no leaked process, mount, port or lease; no action ran twice; no desktop had two owners; no failure became a score.
`SLIME_CUA_CHAOS_EVENTS=200` makes it long; every run prints its seed and what it did.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from sandbox_cluster.client import SandboxClient
from sandbox_cluster.cluster import LocalCluster
from slime_cua.config.sandbox import SandboxConfig
from slime_cua.core.errors import PreflightError
from tests.e2e.chaos_parts import BreakingProxy, Ledger, episode
from tests.e2e.local_rig import mounts

NUM_EVENTS = int(os.environ.get("SLIME_CUA_CHAOS_EVENTS", "80"))
SEED = int(os.environ.get("SLIME_CUA_CHAOS_SEED", "7"))
NUM_WORKERS = 3
TTL_S = 4.0
START_TIMEOUT_S = 300.0
"""Of a gateway or host that starts again; a loaded machine is no fault."""


@dataclass
class Chaos:
    """The cluster under attack. Each attack returns when the thing attacked works again."""

    cluster: LocalCluster
    to_gateway: BreakingProxy
    to_host: BreakingProxy
    random: random.Random
    workers: list[Worker]
    happened: Counter[str] = field(default_factory=Counter)
    children: dict[int, float] = field(default_factory=dict)
    clock: Path = Path()
    """Holds the seconds by which the wall clock of gateway and host is off."""
    x_locks: list[Path] = field(default_factory=list)

    def attacks(self) -> list[tuple[int, Callable[[], Awaitable[str]]]]:
        return [
            (2, self.kill_gateway),
            (2, self.kill_host),
            (3, self.freeze_gateway),
            (3, self.freeze_host),
            (4, self.break_reply),
            (4, self.break_host_reply),
            (4, self.kill_desktop),
            (5, self.kill_judge),
            (3, self.lose_client),
            (2, self.fill_disk),
            (1, self.fill_hosts_disk),
            (1, self.take_port),
            (1, self.take_hosts_port),
            (3, self.freeze_desktop),
            (3, self.freeze_judge),
            (2, self.cut_link),
            (2, self.step_clock),
            (1, self.leave_x_lock),
        ]

    async def attack(self) -> None:
        weights, choices = zip(*self.attacks(), strict=True)
        [chosen] = self.random.choices(choices, weights)
        self.happened[await chosen()] += 1

    def note_children(self) -> None:
        for service in (self.cluster.gateway, self.cluster.host):
            with contextlib.suppress(psutil.Error):
                assert service is not None
                parent = psutil.Process(service.process.pid)
                for one in (parent, *parent.children(recursive=True)):
                    self.children.setdefault(one.pid, one.create_time())

    async def kill_gateway(self) -> str:
        assert self.cluster.gateway
        port = self.cluster.gateway.port
        self.cluster.gateway.process.kill()
        self.cluster.gateway.stop()
        await asyncio.to_thread(self.cluster.start_gateway, port)
        return "gateway killed"

    async def kill_host(self) -> str:
        assert self.cluster.host
        self.note_children()
        self.cluster.host.process.kill()
        self.cluster.host.stop()
        await asyncio.to_thread(self.cluster.start_host)
        return "host killed"

    async def freeze_gateway(self) -> str:
        assert self.cluster.gateway
        return await self._freeze(self.cluster.gateway.process.pid, "gateway stopped for a while")

    async def freeze_host(self) -> str:
        assert self.cluster.host
        return await self._freeze(self.cluster.host.process.pid, "host stopped for a while")

    async def _freeze(self, pid: int, name: str) -> str:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self.random.uniform(0.3, 1.5))
        os.kill(pid, signal.SIGCONT)
        return name

    async def break_reply(self) -> str:
        fault = self.random.choice(["drop", "slow", "cut", "corrupt"])
        self.to_gateway.armed.append(fault)
        return f"client's reply: {fault}"

    async def break_host_reply(self) -> str:
        fault = self.random.choice(["drop", "slow", "cut", "corrupt"])
        self.to_host.armed.append(fault)
        return f"gateway's reply: {fault}"

    async def kill_desktop(self) -> str:
        desktop = self._child(_is_desktop)
        if desktop is None:
            return "no desktop to kill"
        with contextlib.suppress(psutil.Error):
            desktop.kill()
        return "desktop killed"

    async def freeze_desktop(self) -> str:
        desktop = self._child(_is_desktop)
        if desktop is None:
            return "no desktop to stop"
        await self._freeze_tree(desktop)
        return "desktop stopped for a while"

    async def kill_judge(self) -> str:
        judge = await self._judge()
        if judge is None:
            return "no judge to kill"
        with contextlib.suppress(psutil.Error):
            judge.kill()
        return "judge killed"

    async def freeze_judge(self) -> str:
        judge = await self._judge()
        if judge is None:
            return "no judge to stop"
        await self._freeze_tree(judge)
        return "judge stopped for a while"

    async def _judge(self) -> psutil.Process | None:
        for _ in range(40):
            if (judge := self._child(_is_judge)) is not None:
                return judge
            await asyncio.sleep(0.03)
        return None

    async def _freeze_tree(self, top: psutil.Process) -> None:
        stopped = []
        with contextlib.suppress(psutil.Error):
            for one in (top, *top.children(recursive=True)):
                one.suspend()
                stopped.append(one)
        await asyncio.sleep(self.random.uniform(0.3, 1.5))
        for one in stopped:
            with contextlib.suppress(psutil.Error):
                one.resume()

    def _child(self, is_wanted: Callable[[list[str]], bool]) -> psutil.Process | None:
        """One of the host's processes of that kind; all that it has now are noted."""
        assert self.cluster.host
        self.note_children()
        found = []
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.cluster.host.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    line = child.cmdline()
                    if line and is_wanted(line):
                        found.append(child)
        return self.random.choice(found) if found else None

    async def cut_link(self) -> str:
        """No byte between clients and gateway for longer than a lease lives."""
        self.to_gateway.is_down = True
        await asyncio.sleep(TTL_S + self.random.uniform(0.5, 1.5))
        self.to_gateway.is_down = False
        return "clients' link down for longer than a lease"

    async def step_clock(self) -> str:
        """The wall clock of gateway and host jumps, and stays there."""
        self.clock.write_text(f"{self.random.choice([-1, 1]) * self.random.randint(60, 300_000):+d}")
        return "clocks stepped"

    async def leave_x_lock(self) -> str:
        lock = Path(f"/tmp/.X{self.random.randint(7000, 7999)}-lock")
        await asyncio.to_thread(lock.write_text, f"{2**22 - 1:10d}\n")
        self.x_locks.append(lock)
        return "stale X lock"

    async def lose_client(self) -> str:
        self.random.choice(self.workers).lost.set()
        return "client lost"

    async def fill_disk(self) -> str:
        assert self.cluster.gateway
        await self._no_writes(self.cluster.gateway.process.pid)
        return "gateway's disk full for a while"

    async def fill_hosts_disk(self) -> str:
        assert self.cluster.host
        await self._no_writes(self.cluster.host.process.pid)
        return "host's disk full for a while"

    async def _no_writes(self, pid: int) -> None:
        old = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, old[1]))
        await asyncio.sleep(self.random.uniform(0.3, 1.0))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, old)

    async def take_port(self) -> str:
        assert self.cluster.gateway
        port = self.cluster.gateway.port
        self.cluster.gateway.process.kill()
        self.cluster.gateway.stop()
        with _thief(port), pytest.raises(PreflightError, match="is in use"):
            await asyncio.to_thread(self.cluster.start_gateway, port)
        await asyncio.to_thread(self.cluster.start_gateway, port)
        return "gateway's port taken"

    async def take_hosts_port(self) -> str:
        assert self.cluster.host
        self.note_children()
        self.cluster.host.process.kill()
        self.cluster.host.stop()
        with _thief(self.to_host.target), pytest.raises(PreflightError, match="is in use"):
            await asyncio.to_thread(self.cluster.start_host)
        await asyncio.to_thread(self.cluster.start_host)
        return "host's port taken"


@contextlib.contextmanager
def _thief(port: int) -> Iterator[None]:
    """Somebody else listens there."""
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", port))
        thief.listen()
        yield


def _is_desktop(line: list[str]) -> bool:
    return "bwrap" in line[0] and not _is_judge(line)


def _is_judge(line: list[str]) -> bool:
    return "/job/runner.py" in line


class Worker:
    """Plays episodes one after another. When it is lost its client goes without a word: nothing is released."""

    def __init__(self, number: int, make_client: Callable[[], SandboxClient], ledger: Ledger) -> None:
        self._name, self._make_client, self._ledger = f"w{number}", make_client, ledger
        self.lost = asyncio.Event()
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            self.lost.clear()
            client = self._make_client()
            name = f"{self._name}-{random.getrandbits(48):x}"
            playing = asyncio.ensure_future(episode(client, name, self._ledger))
            losing = asyncio.ensure_future(self.lost.wait())
            try:
                await asyncio.wait({playing, losing}, return_when=asyncio.FIRST_COMPLETED)
                if playing.done():
                    playing.result()
                else:
                    self._ledger.outcomes["client lost"] += 1
            finally:
                await client.close()
                for task in (playing, losing):
                    task.cancel()
                await asyncio.gather(playing, losing, return_exceptions=True)


def config_of(provider: str) -> SandboxConfig:
    return SandboxConfig(
        provider=provider,  # type: ignore[arg-type]
        num_desktops=NUM_WORKERS,
        num_spares=1,
        screen_wh_px=(320, 200),
        acquire_timeout_s=20.0,
        setup_timeout_s=8.0,
        step_timeout_s=8.0,
        execute_timeout_s=6.0,
        evaluate_timeout_s=10.0,
        settle_quiet_ms=0,
        settle_max_ms=0,
    )


async def no_lease_is_left(cluster: LocalCluster) -> list[object]:
    """What is left of leases after a few times their life."""
    left: list[object] = []
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False) as http:
        for _ in range(60):
            headers = {"authorization": f"Bearer {cluster.token}"}
            left = (await http.get("/v1/leases", headers=headers)).json()
            hosts = (await http.get("/v1/hosts", headers=headers)).json()
            if not left and sum(host["num_leased"] for host in hosts) == 0:
                return []
            await asyncio.sleep(0.25)
    return left or ["a host still counts a lease"]


async def still_works(ledger: Ledger) -> bool:
    """After the chaos every worker gets through an episode again."""
    before = ledger.outcomes["valid"]
    for _ in range(600):
        if ledger.outcomes["valid"] >= before + NUM_WORKERS:
            return True
        await asyncio.sleep(0.1)
    return False


def still_running(children: dict[int, float], timeout_s: float = 10.0) -> list[int]:
    end = time.monotonic() + timeout_s
    while True:
        alive = []
        for pid, created in children.items():
            with contextlib.suppress(psutil.Error):
                one = psutil.Process(pid)
                if one.create_time() == created and one.status() != psutil.STATUS_ZOMBIE:
                    alive.append(pid)
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.2)


def sockets_left(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_socket()]


def groups_left(state: Path) -> list[Path]:
    """Control groups of this cluster's host."""
    label = f"run-{hashlib.sha256(str(state.resolve()).encode()).hexdigest()[:8]}"
    return [group for group in Path("/sys/fs/cgroup").glob("*/slime_cua/*") if group.name.startswith(label)]


@pytest.mark.timeout(0)
@pytest.mark.parametrize("provider", ["fake", pytest.param("local", marks=pytest.mark.desktop)])
async def test_nothing_leaks_lies_or_acts_twice(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, mounts_before = Ledger(), mounts()
    clock = tmp_path / "clock"
    clock.write_text("+0")
    monkeypatch.setenv("CHAOS_CLOCK", str(clock))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("chaos_site")))
    async with BreakingProxy() as to_gateway, BreakingProxy() as to_host:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            to_host.target = probe.getsockname()[1]
        arguments = ("--port", str(to_host.target), "--advertise", f"http://127.0.0.1:{to_host.port}")
        config = config_of(provider)
        async with LocalCluster(
            config, tmp_path, host_arguments=arguments, start_timeout_s=START_TIMEOUT_S
        ) as cluster:
            assert cluster.gateway
            to_gateway.target = cluster.gateway.port
            url = f"http://127.0.0.1:{to_gateway.port}"
            workers = [
                Worker(number, lambda: SandboxClient(url, cluster.token, config, ttl_s=TTL_S), ledger)
                for number in range(NUM_WORKERS)
            ]
            chaos = Chaos(cluster, to_gateway, to_host, random.Random(SEED), workers, clock=clock)
            try:
                for _ in range(NUM_EVENTS):
                    await asyncio.sleep(chaos.random.uniform(0.1, 0.5))
                    await chaos.attack()
                    assert not [one for one in workers if one.task.done()], ledger
                to_gateway.armed.clear()
                to_host.armed.clear()
                assert await still_works(ledger), "no episode is valid after the last event"
            finally:
                for one in workers:
                    one.task.cancel()
                await asyncio.gather(*(one.task for one in workers), return_exceptions=True)
            print(
                f"seed {SEED}: {dict(chaos.happened)}; met {dict(to_gateway.met + to_host.met)}; {dict(ledger.outcomes)}"
            )
            assert await no_lease_is_left(cluster) == []
            chaos.note_children()
            ports = (cluster.gateway.port, to_host.target)
            for lock in chaos.x_locks:
                lock.unlink(missing_ok=True)
    assert ledger.wrong == []
    assert still_running(chaos.children) == []
    assert mounts() - mounts_before == Counter()
    assert groups_left(tmp_path) == []
    assert sockets_left(tmp_path) == []
    for port in ports:
        with _thief(port):
            pass
