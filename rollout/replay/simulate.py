"""One replay: the real RolloutWorker over a trace and a site, on a virtual clock, with the loop of train.py around it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollout.replay.clock import run_virtual
from rollout.replay.machines import Site
from rollout.replay.policies import BarrierScheduler, ForeseeingScheduler, FreeScheduler, Policy
from rollout.replay.scenario import ScenarioConfig, SiteConfig
from rollout.replay.trace import EpisodeTrace, GroupTrace, Trace, drawn_groups
from rollout.worker import RolloutWorker
from slime_cua.algo.samplers import TaskSampler
from slime_cua.config.rollout import RolloutConfig
from slime_cua.core.types import Episode, EpisodeGroup, Task
from slime_cua.data.episodes import EpisodeStore

METHODS = (
    "capacity",
    "num_to_draw",
    "enqueue",
    "dequeue",
    "admit",
    "record_version",
    "record_duration",
    "finish",
    "drop",
    "next_batch",
    "trained",
)
EARLIER = 1_000_000
"""Occurrence of a task that stands for its last group before the replay: what is known of its duration."""


@dataclass
class EpisodeResult:
    """What one attempt of a replay did."""

    trace: EpisodeTrace
    tokens: Counter[int] = field(default_factory=Counter)
    """Sampled tokens by version."""


@dataclass
class Replay:
    """What a replay measured. Times are virtual seconds."""

    policy: Policy
    scenario: ScenarioConfig
    seconds: float
    train_s: float
    publish_s: float
    busy: dict[str, float]
    admitted: list[GroupTrace]
    trained: list[GroupTrace]
    trained_episodes: list[EpisodeTrace]
    lag_tokens: Counter[int]
    """Trained tokens by age at their step."""
    masked_tokens: int
    lost_tokens: int
    """Sampled by groups that were dropped, and by attempts that were cut off or failed."""
    sampled_tokens: int
    counts: dict[str, int]
    scheduler_cpu_s: float
    process_cpu_s: float
    step_ends_s: list[float]

    @property
    def num_groups(self) -> int:
        return len(self.trained)

    @property
    def groups_per_hour(self) -> float:
        return 3600 * self.num_groups / self.seconds

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer waits for a batch."""
        return 1 - (self.train_s + self.publish_s) / self.seconds


class DrawSampler(TaskSampler):
    """Tasks in the trace's order, whatever was learnt."""

    def __init__(self, trace: Trace, told: Callable[[str], None]) -> None:
        super().__init__(trace.task_ids, seed=0)
        self._trace, self._told, self._next = trace, told, 0

    def weights(self) -> dict[str, float]:
        return dict.fromkeys(self.task_ids, 1.0 / len(self.task_ids))

    def sample(self, n: int) -> list[str]:
        drawn = [self._trace.draw(self._next + index) for index in range(n)]
        self._next += n
        for task_id in drawn:
            self._told(task_id)
        return drawn

    def _learn(self, task_id: str, outcomes: list[float]) -> None:
        pass


class NoStore(EpisodeStore):
    """Keeps nothing; tells the replay of each group that ended."""

    def __init__(self, told: Any) -> None:
        super().__init__("/dev/null")
        self._told = told

    def append(self, group: EpisodeGroup) -> None:
        self._told(group)


def step_seconds(site: SiteConfig, tokens: float, mean_tokens: float) -> float:
    """Time of a step over `tokens`, where a step over `mean_tokens` takes site.step_s."""
    share = site.step_token_share
    return site.step_s * (1 - share + share * tokens / mean_tokens)


def mean_step_tokens(trace: Trace, scenario: ScenarioConfig) -> float:
    """Tokens of a step's groups, mean over the groups that a run without drops trains."""
    groups = drawn_groups(trace, scenario.groups_per_step * scenario.num_steps)
    return sum(group_tokens(group, scenario.episodes_per_group) for group in groups) / scenario.num_steps


def group_tokens(group: GroupTrace, num_episodes: int) -> int:
    return sum(group.attempt(n).train_tokens for n in range(num_episodes))


def valid_attempts(group: GroupTrace, scenario: ScenarioConfig) -> list[EpisodeTrace]:
    """The attempts of a group that count: the first ones, and replacements of those that fail."""
    wanted, retries, number = scenario.episodes_per_group, scenario.max_infra_retries, 0
    attempts = []
    while number < wanted:
        episode = group.attempt(number)
        number += 1
        if episode.reward is not None:
            attempts.append(episode)
        elif retries:
            wanted, retries = wanted + 1, retries - 1
    return attempts


def nominal_s(group: GroupTrace, scenario: ScenarioConfig) -> float:
    """First token to end of the group's longest valid attempt, on an idle site."""
    token_s, read_s = scenario.site.decode_s, 1 / scenario.site.prefill_tokens_per_s
    return max((e.span_s(token_s, read_s) for e in valid_attempts(group, scenario)), default=0.0)


def typical_s(group: GroupTrace, scenario: ScenarioConfig) -> float:
    """Geometric mean over the group's valid attempts, first token to end, on an idle site: what the worker measures."""
    token_s, read_s = scenario.site.decode_s, 1 / scenario.site.prefill_tokens_per_s
    spans = [max(1e-3, e.span_s(token_s, read_s)) for e in valid_attempts(group, scenario)]
    return statistics.geometric_mean(spans) if spans else 0.0


class Run:
    """The loop of train.py over a real RolloutWorker; `play` stands for desktops and engines."""

    def __init__(self, trace: Trace, scenario: ScenarioConfig, policy: Policy) -> None:
        self.trace, self.scenario, self.policy = trace, scenario, policy
        self.site = Site(scenario.site)
        self._time, self._started_s = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
        in_flight = max(1, scenario.site.num_desktops // scenario.episodes_per_group)
        self.scheduler = policy.make(scenario.groups_per_step, in_flight)
        self.scheduler_cpu_s = 0.0
        self._ended = asyncio.Event()
        self._meter_scheduler()
        self.worker = RolloutWorker(
            self._config(),
            {task_id: Task(id=task_id, instruction="") for task_id in trace.task_ids},
            DrawSampler(trace, self._drawn),
            self.scheduler,
            self.store(),
            self.play,
        )
        self.groups: dict[str, GroupTrace] = {}
        self.episodes: dict[str, dict[str, EpisodeResult]] = {}
        self._occurrences: Counter[str] = Counter()
        self._draws: Counter[str] = Counter()
        self._mean_tokens = mean_step_tokens(trace, scenario)
        self._trained_ids: set[str] = set()
        self._trained_names: set[str] = set()
        self.lag_tokens: Counter[int] = Counter()
        self.masked_tokens = 0

    def clock(self) -> float:
        """Seconds since the replay began."""
        return self._time() - self._started_s

    def store(self) -> EpisodeStore:
        """Where finished groups go."""
        return NoStore(self._group_ended)

    def attempt(self, task_id: str, group_id: str, episode_id: str) -> EpisodeResult:
        """What the trace says of an attempt; its tokens are counted there."""
        if group_id not in self.groups:
            self.groups[group_id] = self.trace.group(task_id, self._occurrences[task_id])
            self._occurrences[task_id] += 1
        result = EpisodeResult(self.groups[group_id].attempt(int(episode_id.rsplit("-e", 1)[1])))
        self.episodes.setdefault(group_id, {})[episode_id] = result
        return result

    def _config(self) -> RolloutConfig:
        return RolloutConfig(
            groups_per_step=self.scenario.groups_per_step,
            episodes_per_group=self.scenario.episodes_per_group,
            max_infra_retries=self.scenario.max_infra_retries,
            scheduler=self.policy.options,
        )

    def _meter_scheduler(self) -> None:
        """CPU time of this thread inside the scheduler's methods, nested calls counted once."""
        depth = 0

        def metered(method: Any) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal depth
                depth += 1
                begun = time.thread_time()
                try:
                    return method(*arguments, **named)
                finally:
                    depth -= 1
                    if not depth:
                        self.scheduler_cpu_s += time.thread_time() - begun

            return call

        for name in METHODS:
            setattr(self.scheduler, name, metered(getattr(self.scheduler, name)))

    def _group_ended(self, group: EpisodeGroup) -> None:
        asyncio.get_running_loop().call_soon(self._ended.set)
        if isinstance(self.scheduler, FreeScheduler):
            asyncio.get_running_loop().call_soon(self.worker.admit)

    async def play(self, task: Task, group_id: str, episode_id: str, on_request: Any) -> Episode:
        """What the player and the episode do: a desktop, a session at an engine, turns, the judge."""
        result = self.attempt(task.id, group_id, episode_id)
        attempt = result.trace
        async with self.site.desktop():
            await asyncio.sleep(attempt.boot_s)
            started_s = self.clock()
            await asyncio.sleep(attempt.setup_s)
            async with self.site.session(episode_id) as engine:
                for turn in attempt.turns:
                    on_request()
                    result.tokens.update(await self.site.sample(episode_id, engine, turn))
                    await asyncio.sleep(turn.act_s)
            await asyncio.sleep(attempt.judge_s)
        return Episode(
            episode_id=episode_id,
            group_id=group_id,
            task_id=task.id,
            turns=(),
            reward=attempt.reward,
            stop_reason="invalid" if attempt.reward is None else "terminated",
            error="InfrastructureError: as the trace says" if attempt.reward is None else None,
            started_s=started_s,
            ended_s=self.clock(),
        )

    def _tell_durations(self) -> None:
        """What is known of the tasks before the replay: one earlier group of each, or many where it has foresight."""
        for task_id in self.trace.task_ids:
            if isinstance(self.scheduler, ForeseeingScheduler):
                many = [typical_s(self.trace.group(task_id, EARLIER + n), self.scenario) for n in range(16)]
                self.scheduler.foresee(task_id, statistics.geometric_mean(many))
            else:
                earlier = typical_s(self.trace.group(task_id, EARLIER), self.scenario)
                self.scheduler.record_duration(task_id, earlier)

    def _drawn(self, task_id: str) -> None:
        group = self.trace.group(task_id, self._draws[task_id])
        self._draws[task_id] += 1
        if isinstance(self.scheduler, ForeseeingScheduler) and self.policy.foresight == "groups":
            self.scheduler.foresee(task_id, nominal_s(group, self.scenario))

    async def run(self) -> Replay:
        """num_steps steps."""
        cpu = time.thread_time()
        train_s, ends = 0.0, []
        self._tell_durations()
        self.worker.start()
        for step in range(self.scenario.num_steps):
            batch = await self.worker.next_batch()
            if isinstance(self.scheduler, BarrierScheduler):
                self.scheduler.steps_started += 1
                self.worker.admit()
            seconds = self._account(batch, step)
            train_s += seconds
            await asyncio.sleep(seconds)
            if isinstance(self.scheduler, BarrierScheduler):
                await self._collected({group.group_id for group in batch})
            await self.site.publish(step + 1)
            self.worker.trained([group.group_id for group in batch])
            ends.append(self.clock())
        seconds = self.clock()
        cpu = time.thread_time() - cpu
        result = self._result(seconds, train_s, cpu, ends)
        await self.worker.stop()
        return result

    async def _collected(self, leaving: set[str]) -> None:
        """All groups but those in training are finished."""
        while not all(g.is_finished for g in self.scheduler.groups.values() if g.group_id not in leaving):
            self._ended.clear()
            await self._ended.wait()

    def _account(self, batch: list[EpisodeGroup], version: int) -> float:
        oldest = version - (self.policy.max_lag or 0) if self.policy.options.stale == "mask" else None
        tokens = 0
        for group in batch:
            self._trained_ids.add(group.group_id)
            for episode in group.episodes:
                if not episode.is_valid:
                    continue
                result = self.episodes[group.group_id][episode.episode_id]
                self._trained_names.add(episode.episode_id)
                tokens += result.trace.train_tokens
                for sampled_by, count in result.tokens.items():
                    if oldest is not None and sampled_by < oldest:
                        self.masked_tokens += count
                    else:
                        self.lag_tokens[version - sampled_by] += count
        return step_seconds(self.scenario.site, tokens, self._mean_tokens)

    def _result(self, seconds: float, train_s: float, cpu_s: float, ends: list[float]) -> Replay:
        waiting = set(self.scheduler.groups)
        sampled = lost = 0
        trained_episodes = []
        for group_id, episodes in self.episodes.items():
            for name, result in episodes.items():
                count = sum(result.tokens.values())
                sampled += count
                if name in self._trained_names:
                    trained_episodes.append(result.trace)
                elif group_id not in waiting:
                    lost += count
        names = ("num_admitted", "num_dropped", "num_stale", "num_masked", "num_filtered")
        return Replay(
            policy=self.policy,
            scenario=self.scenario,
            seconds=seconds,
            train_s=train_s,
            publish_s=self.scenario.num_steps * self.scenario.site.publish_s,
            busy=self.site.busy_shares(seconds) | {"trainer": train_s / seconds},
            admitted=list(self.groups.values()),
            trained=[self.groups[group_id] for group_id in self._trained_ids],
            trained_episodes=trained_episodes,
            lag_tokens=self.lag_tokens,
            masked_tokens=self.masked_tokens,
            lost_tokens=lost,
            sampled_tokens=sampled,
            counts={name: getattr(self.scheduler, name) for name in names},
            scheduler_cpu_s=self.scheduler_cpu_s,
            process_cpu_s=cpu_s,
            step_ends_s=ends,
        )


def simulate(trace: Trace, scenario: ScenarioConfig, policy: Policy) -> Replay:
    """Play `scenario.num_steps` steps of `trace` under `policy` on a virtual clock."""

    async def main() -> Replay:
        return await Run(trace, scenario, policy).run()

    return run_virtual(main())
