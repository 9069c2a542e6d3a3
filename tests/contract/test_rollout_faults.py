"""Seeded faults under a whole rollout: engines, desktops, judges, clients and the disk fail; groups are neither lost nor doubled.

Real: gateway and host over sockets, leases, sandbox client, player, episode loop, renderer, worker, scheduler, stores. Doubles
at the borders: engines that answer by script over HTTP, fake desktops, an image folder whose disk fills up.
SLIME_CUA_FAULT_ROUNDS sets the number of rounds (default: one of each kind).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout.actions import ActionSpace
from rollout.context import context_policy
from rollout.engines import EngineClient, EnginePolicy
from rollout.episode import EpisodeRunner
from rollout.player import Player
from rollout.renderer import Renderer
from rollout.scheduler import Scheduler
from rollout.worker import RolloutWorker
from slime_cua.algo.samplers import UniformSampler
from slime_cua.config.rollout import ContextConfig, RendererConfig, RolloutConfig, SamplingConfig
from slime_cua.config.sandbox import SandboxConfig
from slime_cua.core.types import EpisodeGroup, ImageRef, Task
from slime_cua.data.episodes import EpisodeStore, OpenGroups
from slime_cua.data.images import ImageStore
from slime_cua.launch.desktops import GatewayDesktops
from tests.contract.gateway_rig import ALICE, SIZE, Machine, Rig, acquire_body
from tests.contract.scripted_engine import LOGP, ScriptedEngine

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny_base"
FAULTS = (
    "an engine is killed",
    "the router restarts",
    "a desktop never answers",
    "a desktop dies",
    "a reply is lost",
    "a desktop does not boot",
    "a judge hangs",
    "a client disappears",
    "the disk is full for images",
)
ROUNDS = int(os.environ.get("SLIME_CUA_FAULT_ROUNDS", len(FAULTS)))
DEADLINE_S = float(os.environ.get("SLIME_CUA_FAULT_DEADLINE_S", "120"))
NUM_STEPS, LAG = 3, 1
TASKS = {name: Task(id=name, instruction="Wait.", evaluator={"func": "infeasible"}) for name in "abcdef"}
SANDBOX = SandboxConfig(
    provider="fake",
    num_desktops=3,
    screen_wh_px=SIZE,
    settle_quiet_ms=0,
    settle_max_ms=0,
    step_timeout_s=3.0,
    setup_timeout_s=5.0,
)
CONFIG = RolloutConfig(
    groups_per_step=2,
    episodes_per_group=3,
    max_turns=5,
    max_policy_lag=LAG,
    max_infra_retries=3,
    episode_timeout_s=20.0,
    turn_timeout_s=15.0,
    sampling=SamplingConfig(max_response_tokens=200),
    context=ContextConfig(max_images=2, retain=1),
    renderer=RendererConfig(prompt="short"),
)


class Disk(ImageStore):
    """Images on a disk that fills up."""

    is_full = False

    def put(self, png: bytes, width_px: int | None = None, height_px: int | None = None) -> ImageRef:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.root))
        return super().put(png, width_px, height_px)


class Desktops(GatewayDesktops):
    """Leased ones, whose judge may hang."""

    num_hung_judges = 0

    @contextlib.asynccontextmanager
    async def lease(self, task: Task, episode_id: str) -> AsyncIterator[Any]:
        async with super().lease(task, episode_id) as desktop:
            judge = desktop.evaluate

            async def evaluate(*arguments: Any) -> Any:
                if self.num_hung_judges:
                    self.num_hung_judges -= 1
                    await asyncio.Event().wait()
                return await judge(*arguments)

            desktop.evaluate = evaluate  # type: ignore[method-assign]
            yield desktop


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.from_config(MODEL, CONFIG.renderer, ActionSpace.from_config(CONFIG.action_space))


class Side:
    """The rollout side of one life of a run: everything that a crash of its process would take away."""

    def __init__(self, run: Run, state: dict[str, Any] | None) -> None:
        sampler = UniformSampler(list(TASKS), seed=run.seed)
        scheduler = Scheduler(CONFIG.groups_per_step, LAG, options=CONFIG.scheduler)
        if state is not None:
            sampler.load_state_dict(state["sampler"])
            scheduler = Scheduler.from_state_dict(state["scheduler"], CONFIG.scheduler)
        self.disk = Disk(run.folder / "images")
        self.client = EngineClient(run.urls, run.renderer.images, request_timeout_s=14.0)
        self.client.set_engines(run.urls, scheduler.version)
        self.desktops = Desktops(run.rig.url, ALICE, SANDBOX)
        runner = EpisodeRunner(CONFIG, run.renderer, context_policy(CONFIG.context), self.disk)
        player = Player(runner, self.desktops, SANDBOX.num_desktops)
        policy = EnginePolicy(self.client, CONFIG.sampling)
        self.worker = RolloutWorker(
            CONFIG,
            TASKS,
            sampler,
            scheduler,
            EpisodeStore(run.folder / "rl.jsonl"),
            lambda task, group_id, episode_id, on_request: player.play(
                task, policy, group_id=group_id, episode_id=episode_id, on_request=on_request
            ),
            open_groups=OpenGroups(run.folder / "open"),
        )
        self.worker.restore(state or self.worker.state_dict())
        self.worker.hold()

    async def end(self) -> None:
        await self.worker.stop()
        await self.desktops.close()
        await self.client.__aexit__()


class Run:
    """A run of NUM_STEPS steps with one fault somewhere in it."""

    def __init__(self, seed: int, rig: Rig, machine: Machine, renderer: Renderer, folder: Path) -> None:
        self.seed, self.rig, self.machine, self.renderer, self.folder = seed, rig, machine, renderer, folder
        self.draw, self.fault = random.Random(seed), FAULTS[seed % len(FAULTS)]
        self.engines = [ScriptedEngine(renderer, seed) for _ in range(2)]
        self.urls = [engine.url for engine in self.engines]
        self.break_at = self.draw.randrange(NUM_STEPS - 1)
        """The step in which something fails."""
        self.is_time = asyncio.Event()
        self.trained: list[EpisodeGroup] = []
        self.num_lives = 1

    async def play(self) -> None:
        side = Side(self, None)
        state = json.loads(json.dumps(side.worker.state_dict()))
        breaking = asyncio.create_task(self.break_something(side))
        side.worker.release()
        while (version := side.worker.scheduler.version) < NUM_STEPS:
            if version >= self.break_at:
                self.is_time.set()
            try:
                groups = await side.worker.next_batch()
            except OSError as error:
                assert error.errno == errno.ENOSPC and self.fault == "the disk is full for images"
                await side.end()
                side, self.num_lives = Side(self, state), 2
                side.worker.release()
                continue
            self.check(groups, version)
            self.trained += groups
            state = json.loads(json.dumps(side.worker.commit([group.group_id for group in groups])))
            await self.publish(side, version + 1)
            if version + 1 < NUM_STEPS:
                side.worker.release()
        await breaking
        await side.end()

    async def publish(self, side: Side, version: int) -> None:
        for engine in self.engines:
            engine.pause()
        await asyncio.sleep(0.05)
        for engine in self.engines:
            engine.go_on(version)
        side.client.set_engines(self.urls, version)

    async def break_something(self, side: Side) -> None:
        await self.is_time.wait()
        await asyncio.sleep(self.draw.uniform(0.0, 0.3))
        faults, count = self.machine.provider.faults, 1 + self.draw.randrange(2)
        if self.fault in ("an engine is killed", "the router restarts"):
            hit = self.engines if self.fault == "the router restarts" else self.engines[:1]
            for engine in hit:
                engine.is_dead = True
            await asyncio.sleep(self.draw.uniform(0.3, 1.0))
            for engine in hit:
                engine.is_dead = False
        elif self.fault == "a desktop never answers":
            faults.num_hung_screenshots = count
        elif self.fault == "a desktop dies":
            faults.num_deaths = count
        elif self.fault == "a reply is lost":
            faults.num_lost_replies = count
        elif self.fault == "a desktop does not boot":
            faults.num_failing_boots = count
        elif self.fault == "a judge hangs":
            side.desktops.num_hung_judges = 1
        elif self.fault == "a client disappears":
            async with self.rig.http() as http:
                reply = await http.post("/v1/leases", json=acquire_body(ttl_s=1.0, deadline_s=20.0))
                assert reply.status_code == 200
        else:
            side.disk.is_full = True

    def check(self, groups: list[EpisodeGroup], version: int) -> None:
        """Every token of a batch has a version within the lag, its log-prob, and everything the trainer needs."""
        assert len(groups) == CONFIG.groups_per_step
        for group in groups:
            valid = [episode for episode in group.episodes if episode.is_valid]
            assert 2 <= len(valid) <= CONFIG.episodes_per_group
            for turn in (turn for episode in valid for turn in episode.turns):
                assert len(turn.response_ids) == len(turn.response_versions) == len(turn.response_logp) > 0
                assert set(turn.response_logp) == {LOGP}
                assert set(turn.response_versions) <= {version - LAG, version}
                assert list(turn.response_versions) == sorted(turn.response_versions)
                assert all(ref in ImageStore(self.folder / "images") for ref in turn.context_images)


async def one_round(seed: int, renderer: Renderer, folder: Path) -> Run:
    rig = Rig(folder, host_timeout_s=60.0)
    async with asyncio.timeout(DEADLINE_S), rig.gateway(), rig.host(slots=3, spares=1) as machine:
        run = Run(seed, rig, machine, renderer, folder)
        try:
            await run.play()
        finally:
            for engine in run.engines:
                engine.close()
        faults = machine.provider.faults
        kept_back = (
            faults.num_hung_screenshots,
            faults.num_deaths,
            faults.num_lost_replies,
            faults.num_failing_boots,
        )
        assert kept_back == (0, 0, 0, 0), "the fault did not happen"
        async with rig.http() as http:
            left: list[Any] = [0]
            for _ in range(450):  # one that was being asked for when the run ended lives as long as its lease
                left = (await http.get("/v1/leases")).json()
                if not left:
                    break
                await asyncio.sleep(0.1)
            assert left == [], "a desktop was not given back"
    return run


@pytest.mark.timeout(60 + DEADLINE_S * ROUNDS)
async def test_whatever_fails_no_group_is_lost_or_doubled_and_nothing_hangs(
    renderer: Renderer, tmp_path: Path
) -> None:
    for seed in range(ROUNDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run = await one_round(seed, renderer, folder)
        names = [group.group_id for group in run.trained]
        assert len(names) == len(set(names)) == NUM_STEPS * CONFIG.groups_per_step, run.fault
        kept = [group.group_id for group in EpisodeStore(folder / "rl.jsonl")]
        assert len(kept) == len(set(kept)) and set(names) <= set(kept), run.fault
        played = [episode.episode_id for group in run.trained for episode in group.episodes]
        assert len(played) == len(set(played)), run.fault
        assert run.num_lives == (2 if run.fault == "the disk is full for images" else 1)
        print(f"round {seed}: {run.fault}; {sum(e.num_aborted for e in run.engines)} turns over an update")
