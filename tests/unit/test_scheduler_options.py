"""Every option at the edge of the lag bound, alone and together, in the real worker on the virtual clock.

Durations are heavy-tailed, attempts fail, groups are flat. Claims: a step always comes (a schedule that waits for nothing is an
error of the clock, not a hang), refills end, no token is trained beyond the bound, every group is counted once, no task starves.
"""

import asyncio
import itertools
import json
import random
from collections import Counter

import pytest

from rollout.replay.clock import run_virtual
from rollout.scheduler import Scheduler
from rollout.worker import RolloutWorker
from slime_cua.algo.samplers import UniformSampler
from slime_cua.config.algo import AdvantageConfig
from slime_cua.config.rollout import RolloutConfig, SchedulerConfig
from slime_cua.core.actions import TerminateAction
from slime_cua.core.errors import ConfigError, InfrastructureError
from slime_cua.core.types import Episode, Task, Turn
from slime_cua.data.episodes import EpisodeStore
from slime_cua.data.samples import make_train_samples

STEP_S = 10.0
SLOW_S = 400.0


def turn(index, version):
    return Turn(
        index=index,
        starts_segment=index == 0,
        context_ids=(1,),
        response_ids=(2,),
        response_logp=(0.0,),
        response_versions=(version,),
        action=TerminateAction(status="success"),
    )


class Run:
    """A worker whose episodes are three turns; `seconds` by task, attempts vary around it by a factor of up to 3."""

    def __init__(self, folder, seconds, *, per_step=2, lag=1, seed=0, broken=(), failure_rate=0.1, **options):
        self.config = RolloutConfig(
            groups_per_step=per_step, episodes_per_group=3, scheduler=SchedulerConfig(**options)
        )
        self.seconds, self.broken, self.failure_rate = seconds, set(broken), failure_rate
        self.random = random.Random(seed)
        self.scheduler = Scheduler(per_step, lag, options=self.config.scheduler)
        self.started, self.trained = Counter(), []
        self.worker = RolloutWorker(
            self.config,
            {task_id: Task(id=task_id, instruction="") for task_id in seconds},
            UniformSampler(seconds, seed=seed),
            self.scheduler,
            EpisodeStore(folder / "rl.jsonl"),
            self.play,
        )

    async def play(self, task, group_id, episode_id, on_request):
        self.started[task.id] += 1
        seconds = self.seconds[task.id] * self.random.uniform(1.0, 3.0)
        is_failing = task.id in self.broken or self.random.random() < self.failure_rate
        turns = []
        for index in range(3):
            on_request()
            turns.append(turn(index, self.worker.serving_version))
            await asyncio.sleep(seconds / 3)
        return Episode(
            episode_id=episode_id,
            group_id=group_id,
            task_id=task.id,
            turns=tuple(turns),
            reward=None if is_failing else float(self.random.random() < 0.5),
            stop_reason="invalid" if is_failing else "terminated",
            error="SandboxError: no desktop" if is_failing else None,
            started_s=0.0,
            ended_s=seconds,
        )

    async def steps(self, count):
        """The groups of each step, with the version that trained them."""
        self.worker.start()
        try:
            for version in range(count):
                batch = await self.worker.next_batch()
                self.trained.append((version, batch))
                await asyncio.sleep(STEP_S)
                self.worker.trained([group.group_id for group in batch])
        finally:
            await self.worker.stop()
        return self.trained


def versions_of(group):
    return [v for episode in group.episodes for one in episode.turns for v in one.response_versions]


def check_trained_tokens(batch, oldest_version, bound):
    """What the loss gets of a batch: tokens within the bound, all of them; rewards of every valid episode count."""
    samples = make_train_samples(batch, AdvantageConfig(), oldest_version=oldest_version)
    trained = [
        version
        for sample in samples
        for version, is_trained in zip(sample.segment.versions, sample.segment.is_trained, strict=True)
        if is_trained
    ]
    sampled = [
        version
        for group in batch
        for episode in group.episodes
        if episode.is_valid
        for one in episode.turns
        for version in one.response_versions
    ]
    assert sorted(trained) == sorted(version for version in sampled if version >= bound)
    for group in batch:
        rewards = [episode.reward for episode in group.episodes if episode.is_valid]
        mine = {s.segment.episode_id: s.advantage for s in samples if s.segment.group_id == group.group_id}
        if len(mine) == len(rewards):
            assert abs(sum(mine.values())) < 1e-6, "the baseline is over all valid episodes"


MIXED = {"slow": SLOW_S, "a": 2.0, "b": 4.0, "c": 8.0, "d": 30.0, "e": 1.0}
FILTER = {"filters_flat_groups": True, "max_filtered_per_step": 3}
EARLY = {"num_extra_episodes": 1, "close_factor": 2.0}
EXTRAS = [{}, FILTER, {"num_extra_episodes": 2}, {"close_factor": 1.5}, {"num_ahead_groups": 5}]
EXTRAS += [FILTER | EARLY | {"num_ahead_groups": 4}, {"is_long_first": False, "num_ahead_groups": 3}]


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: "+".join(extra) or "plain")
@pytest.mark.parametrize("stale", ["wait", "mask", "drop"])
def test_steps_come_refills_end_and_no_token_is_older_than_the_bound(tmp_path, stale, extra):
    for lag, seed in itertools.product((0, 1, 2), range(2)):
        more = {"num_extra_groups": 2} if stale != "wait" and seed else {}
        run = Run(tmp_path / f"{lag}-{seed}", MIXED, lag=lag, seed=seed, stale=stale, **extra, **more)
        num_steps = 20
        trained = run_virtual(run.steps(num_steps))
        s = run.scheduler
        assert [len(batch) for _, batch in trained] == [2] * num_steps
        for version, batch in trained:
            for group in batch:
                assert sum(episode.is_valid for episode in group.episodes) >= 2
                oldest = min(versions_of(group))
                assert max(versions_of(group)) <= version
                assert stale == "mask" or oldest >= version - lag
            check_trained_tokens(batch, version - lag if stale == "mask" else 0, version - lag)
        masked = sum(min(versions_of(g)) < v - lag for v, batch in trained for g in batch)
        assert s.num_masked == masked and (stale == "mask" or masked == 0)
        ids = [group.group_id for _, batch in trained for group in batch]
        assert len(ids) == len(set(ids)) == 2 * num_steps, "each group is trained once"
        assert s.num_admitted == s.num_dropped + 2 * num_steps + len(s.groups), "and counted once"
        assert s.num_filtered <= 3 * (num_steps + 1)
        assert s.num_stale == 0 or stale == "drop"
        limit = (num_steps + lag + 1) * 2 + run.config.scheduler.num_extra_groups + s.num_dropped
        assert s.num_admitted <= limit


@pytest.mark.parametrize("stale", ["wait", "mask", "drop"])
@pytest.mark.parametrize("extra", [{}, {"num_ahead_groups": 4}, {"close_factor": 2.0}], ids=str)
def test_no_task_starves(tmp_path, stale, extra):
    run = Run(tmp_path, MIXED, stale=stale, failure_rate=0.0, **extra)
    trained = Counter(g.task_id for _, batch in run_virtual(run.steps(60)) for g in batch)
    assert set(trained) == set(MIXED), f"{set(MIXED) - set(trained)} were never trained"
    if stale == "wait":
        draws = run.worker.sampler.num_draws
        left = len(run.scheduler.groups) + len(run.scheduler.waiting)
        assert sum(draws[task] - trained[task] for task in MIXED) == left, "all that is drawn is trained"


def test_a_step_starts_at_once_when_nothing_would_get_too_old(tmp_path):
    """Lag 1, one group a step: the 400 s group holds the step that would make it too old, not the one before."""
    ends = {}
    for stale in ("wait", "mask"):
        run = Run(tmp_path / stale, {"slow": SLOW_S, "a": 2.0}, per_step=1, failure_rate=0.0, stale=stale)
        trained = run_virtual(run.steps(3))
        ends[stale] = [batch[0].task_id for _, batch in trained]
    assert ends["wait"][:2] == ["a", "slow"]
    assert ends["mask"] == ["a", "a", "a"] or "slow" not in ends["mask"][:2]


def test_weights_that_change_do_not_end_running_episodes(tmp_path):
    run = Run(tmp_path, MIXED, lag=4, failure_rate=0.0)
    groups = [group for _, batch in run_virtual(run.steps(12)) for group in batch]
    spans = [max(versions_of(group)) - min(versions_of(group)) for group in groups]
    assert max(spans) >= 1, "some episodes go over an update"
    assert all(episode.stop_reason == "terminated" for group in groups for episode in group.episodes)
    assert sum(run.started.values()) <= 3 * run.scheduler.num_admitted, "and none is played twice"


def test_early_close_and_over_sampling_cut_off_the_slow_and_count_them(tmp_path):
    whole = Run(tmp_path / "a", MIXED, failure_rate=0.0, seed=3)
    early = Run(tmp_path / "b", MIXED, failure_rate=0.0, seed=3, num_extra_episodes=2, close_factor=1.2)
    cut = []
    for run in (whole, early):
        groups = [group for _, batch in run_virtual(run.steps(10)) for group in batch]
        cut.append(sum(e.stop_reason == "cancelled" for group in groups for e in group.episodes))
    assert cut[0] == 0 and cut[1] >= 10


def test_a_task_that_always_fails_is_drawn_no_more_and_the_others_go_on(tmp_path):
    run = Run(tmp_path, MIXED, broken=["a"], failure_rate=0.0, max_task_failures=2)
    trained = [g.task_id for _, batch in run_virtual(run.steps(40)) for g in batch]
    assert "a" not in trained
    assert run.worker.quarantined == ["a"]
    most = 2 + 2 * 2  # two failures, and what was in flight then
    assert run.started["a"] <= most * (3 + run.config.max_infra_retries)
    again = Run(tmp_path / "again", MIXED, broken=["a"], failure_rate=0.0, max_task_failures=0)
    run_virtual(again.steps(40))
    assert again.worker.quarantined == [] and again.started["a"] > run.started["a"]


def test_failures_must_be_in_a_row(tmp_path):
    run = Run(tmp_path, MIXED, failure_rate=0.5, max_task_failures=8, seed=1)
    run_virtual(run.steps(40))
    assert run.scheduler.num_dropped > 8 and run.worker.quarantined == []


@pytest.mark.parametrize("num_ahead", [0, 5])
@pytest.mark.parametrize("tasks", ["a", "ab", "abcdefghijklmnopqrstuvwxyz"])
def test_a_pool_in_which_everything_fails_ends_with_a_sentence_and_blames_no_task(tmp_path, tasks, num_ahead):
    pool = dict.fromkeys(tasks, 1.0)
    run = Run(tmp_path, pool, broken=pool, max_task_failures=2, num_ahead_groups=num_ahead)
    with pytest.raises(InfrastructureError, match=r"12 groups in a row .*SandboxError: no desktop"):
        run_virtual(run.steps(3))
    assert run.worker.quarantined == []


def test_an_outage_is_not_held_against_the_tasks(tmp_path):
    """Ten groups in a row fail, of two tasks only, and then all is well again."""
    run = Run(tmp_path, {"a": 1.0, "b": 1.0}, failure_rate=0.0, max_task_failures=3)
    play, ended = run.play, Counter()

    async def outage(task, group_id, *rest):
        one = await play(task, group_id, *rest)
        ended[group_id] += 1
        if 4 <= int(group_id[1:]) < 14:
            return one.model_copy(
                update={"reward": None, "stop_reason": "invalid", "error": "SandboxError: gone"}
            )
        return one

    run.worker.play = outage
    run_virtual(run.steps(10))
    assert run.scheduler.num_dropped == 10
    assert run.worker.quarantined == []


def test_the_last_task_is_not_quarantined(tmp_path):
    run = Run(tmp_path, {"a": 1.0, "b": 1.0}, broken=["a"], failure_rate=0.0, max_task_failures=2, per_step=1)
    run_virtual(run.steps(10))
    assert run.worker.quarantined == ["a"]
    run.worker.failures = {"b": (5, 0)}
    run.worker._note_failure("b")
    assert run.worker.sampler.task_ids == ("b",)


def test_a_quarantine_survives_a_resume(tmp_path):
    run = Run(tmp_path, MIXED, broken=["a"], failure_rate=0.0, max_task_failures=2)
    run_virtual(run.steps(40))
    state = json.loads(json.dumps(run.worker.state_dict()))
    assert state["quarantined"] == ["a"] and state["failures"]["a"][0] >= 2
    again = restored(tmp_path, state, MIXED)
    assert again.worker.quarantined == ["a"] and "a" not in again.worker.sampler.task_ids
    assert again.worker.failures == run.worker.failures


def restored(folder, state, tasks):
    run = Run(folder, tasks, max_task_failures=2)
    run.worker.sampler.load_state_dict(state["sampler"])
    run.worker.scheduler = run.scheduler = Scheduler.from_state_dict(state["scheduler"], run.config.scheduler)
    run.worker.restore(state)
    return run


def test_clocks_that_are_set_back_do_not_spoil_measured_durations(tmp_path):
    """Wall-clock times of episodes can run backwards; what is learnt from them stays a positive number of seconds."""
    run = Run(tmp_path, {"a": 1.0, "b": 1.0}, failure_rate=0.0)
    play = run.play

    async def backwards(*arguments):
        one = await play(*arguments)
        return one.model_copy(update={"started_s": 1000.0, "ended_s": 1.0})

    run.worker.play = backwards
    run_virtual(run.steps(3))
    assert all(seconds > 0 for seconds in run.scheduler.durations_s.values())


def test_an_empty_pool_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="there is no task to draw"):
        run_virtual(Run(tmp_path, {}).steps(1))
