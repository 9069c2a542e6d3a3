"""Seeded faults under load: no turn is lost, no token is without a version, nothing hangs past its deadline.

SLIME_CUA_FAULT_ROUNDS sets the number of rounds (default 3, one of each kind), SLIME_CUA_FAULT_DEADLINE_S how long an engine
may take to come back (default 120; more on a machine that is busy with other things).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from rollout.engines import EngineClient, EngineFleet, Generation, HealthRule
from slime_cua.config.rollout import SamplingConfig
from slime_cua.trainer.publisher import BroadcastPublisher
from tests.contract.conftest import ENGINE_CONFIG
from tests.contract.engine_requests import post, processor_of, text_ids

ROUNDS = int(os.environ.get("SLIME_CUA_FAULT_ROUNDS", "3"))
FAULTS = ("kill while generating", "kill while publishing", "kill between pause and continue")
DEADLINE_S = float(os.environ.get("SLIME_CUA_FAULT_DEADLINE_S", "120"))
SAMPLING = SamplingConfig(temperature=0.5, max_response_tokens=60)


@pytest.fixture(scope="module")
def weights(engine_model: Path) -> dict[str, Tensor]:
    return load_file(engine_model / "model.safetensors")


@pytest.fixture
def fleet(engine_model: Path, tmp_path: Path) -> Iterator[EngineFleet]:
    config = ENGINE_CONFIG.model_copy(update={"num_engines": 2})
    rule = HealthRule(interval_s=0.3, timeout_s=2.0, window=4, max_misses=3)
    with EngineFleet.local(config, engine_model, tmp_path, rule=rule) as running:
        yield running


async def play_turns(client: EngineClient, session: int, until: asyncio.Event) -> list[Generation]:
    """Turns of one session, one after another, each starting from the whole stream before it."""
    turns: list[Generation] = []
    stream = text_ids(session, 12)
    while not until.is_set():
        turns.append(await client.generate(stream, [], SAMPLING, session=str(session), seed=session))
        stream = [*stream, *(i for i in turns[-1].ids if i >= 9), *text_ids(session + len(turns), 4)][:2000]
    return turns


def publish(
    publisher: BroadcastPublisher, fleet: EngineFleet, weights: dict[str, Tensor], kill: int | None
) -> None:
    """The next version to all engines, again until one has it; `kill` ends that process in the middle of the first try."""
    version, end = fleet.version + 1, time.monotonic() + DEADLINE_S

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal kill
        for index, pair in enumerate(weights.items()):
            if kill is not None and index == len(weights) // 2:
                os.kill(kill, signal.SIGKILL)
                kill = None
            yield pair

    while True:
        report = publisher.publish(stream(), version, fleet.reachable())
        if report.engines:
            fleet.published(version, report.engines, report.folder)
            return
        assert time.monotonic() < end, report.failures
        time.sleep(0.5)


def wait_for_both(fleet: EngineFleet) -> None:
    """Until both engines serve the current version."""
    end = time.monotonic() + DEADLINE_S
    while len(fleet.serving()) < 2:
        assert time.monotonic() < end, "an engine did not come back"
        time.sleep(0.2)


async def one_round(
    seed: int, fleet: EngineFleet, publisher: BroadcastPublisher, weights: dict[str, Tensor]
) -> None:
    draw = random.Random(seed)
    fault, victim = FAULTS[seed % len(FAULTS)], draw.choice(fleet.handles)
    first_version = fleet.version
    client = EngineClient(fleet.serving(), processor_of(fleet.serving()[0]), request_timeout_s=DEADLINE_S)
    enough = asyncio.Event()
    async with client, asyncio.timeout(2 * DEADLINE_S):
        players = [asyncio.create_task(play_turns(client, 100 * seed + i, enough)) for i in range(6)]
        await asyncio.sleep(draw.uniform(0.2, 1.0))
        if fault == FAULTS[0]:
            os.kill(victim.pid, signal.SIGKILL)
        elif fault == FAULTS[2]:
            await asyncio.to_thread(post, victim.url, "/pause_generation", mode="abort")
            os.kill(victim.pid, signal.SIGKILL)
        kill = victim.pid if fault == FAULTS[1] else None
        await asyncio.to_thread(publish, publisher, fleet, weights, kill)
        client.set_engines(fleet.serving(), fleet.version)
        await asyncio.to_thread(wait_for_both, fleet)
        client.set_engines(fleet.serving(), fleet.version)
        enough.set()
        turns = [turn for player in players for turn in await player]
    assert len(turns) >= 6
    for turn in turns:
        assert len(turn.ids) == len(turn.logp) == len(turn.versions) > 0
        assert set(turn.versions) <= {first_version, fleet.version}
        assert list(turn.versions) == sorted(turn.versions)


@pytest.mark.timeout(300 + 2 * DEADLINE_S * ROUNDS)
async def test_turns_survive_engines_that_are_killed_at_the_worst_moments(
    fleet: EngineFleet, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    publisher = BroadcastPublisher(bucket_bytes=1 << 16, timeout_s=20, keep_folder=tmp_path / "kept")
    try:
        for seed in range(ROUNDS):
            await one_round(seed, fleet, publisher, weights)
            assert len(fleet.serving()) == 2
    finally:
        publisher.close()
    assert fleet.restarts() >= ROUNDS
