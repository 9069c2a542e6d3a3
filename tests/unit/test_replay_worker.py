"""The rollout worker with the scheduler's options, on the virtual clock: what runs, what ends early, what is counted."""

import asyncio
from collections import Counter

import pytest

from rollout.group import ClosingRule, run_group
from rollout.replay.clock import run_virtual
from rollout.scheduler import Scheduler
from rollout.worker import RolloutWorker
from slime_cua.algo.samplers import UniformSampler
from slime_cua.config.rollout import RolloutConfig, SchedulerConfig
from slime_cua.core.types import Episode, Task
from slime_cua.data.episodes import EpisodeStore


def episode(task_id, group_id, episode_id, reward=1.0):
    return Episode(
        episode_id=episode_id,
        group_id=group_id,
        task_id=task_id,
        turns=(),
        reward=reward,
        stop_reason="terminated",
    )


class Fixture:
    """A worker over `seconds` by task; rewards of a group's episodes are 0, 1, 0, 1, ... unless the task is flat."""

    def __init__(self, folder, seconds, *, per_step, lag, flat=(), **options):
        config = RolloutConfig(
            groups_per_step=per_step, episodes_per_group=2, scheduler=SchedulerConfig(**options)
        )
        self.seconds, self.flat = seconds, flat
        self.ended, self.cancelled = Counter(), Counter()
        self.worker = RolloutWorker(
            config,
            {task_id: Task(id=task_id, instruction="") for task_id in seconds},
            UniformSampler(seconds, seed=0),
            Scheduler(per_step, lag, options=config.scheduler),
            EpisodeStore(folder / "rl.jsonl"),
            self.play,
        )

    async def play(self, task, group_id, episode_id, on_request):
        on_request()
        try:
            await asyncio.sleep(self.seconds[task.id])
        except asyncio.CancelledError:
            self.cancelled[task.id] += 1
            raise
        self.ended[task.id] += 1
        number = int(episode_id.rsplit("-e", 1)[1])
        return episode(task.id, group_id, episode_id, 0.0 if task.id in self.flat else float(number % 2))

    async def steps(self, count, seconds=1.0):
        """Task ids of each step's groups."""
        self.worker.start()
        batches = []
        for _ in range(count):
            batch = await self.worker.next_batch()
            batches.append([group.task_id for group in batch])
            await asyncio.sleep(seconds)
            self.worker.trained([group.group_id for group in batch])
        await self.worker.stop()
        return batches


def test_a_pool_smaller_than_a_step_still_fills_every_step(tmp_path):
    run = Fixture(tmp_path, {"a": 1.0, "b": 2.0, "c": 3.0}, per_step=4, lag=1)
    batches = run_virtual(run.steps(3))
    assert [len(batch) for batch in batches] == [4, 4, 4]


def test_dropped_groups_end_at_once_and_their_task_gets_its_turn(tmp_path):
    seconds = {"slow": 50.0, "a": 1.0, "b": 1.0, "c": 1.0}
    run = Fixture(tmp_path, seconds, per_step=1, lag=1, stale="drop")
    batches = run_virtual(run.steps(40))
    scheduler = run.worker.scheduler
    assert run.cancelled["slow"] >= 2, "both attempts of the dropped group"
    assert scheduler.num_stale >= 1
    assert ["slow"] in batches, "after max_task_drops the step waits for it"
    assert sum(run.worker.sampler.in_flight.values()) == len(scheduler.groups) - sum(
        group.is_finished for group in scheduler.groups.values()
    ), "a dropped draw is no longer in flight"


def test_flat_groups_are_replaced_and_a_pool_of_nothing_else_still_steps(tmp_path):
    run = Fixture(
        tmp_path,
        {"a": 1.0, "b": 1.0},
        per_step=1,
        lag=1,
        flat=("a", "b"),
        filters_flat_groups=True,
        max_filtered_per_step=3,
    )
    assert len(run_virtual(run.steps(3))) == 3
    assert 3 <= run.worker.scheduler.num_filtered <= 12
    assert run.worker.scheduler.num_flat_kept >= 3
    mixed = Fixture(tmp_path, {"a": 1.0, "b": 1.0}, per_step=1, lag=0, flat=("a",), filters_flat_groups=True)
    assert run_virtual(mixed.steps(4)) == [["b"]] * 4


def test_tasks_held_back_survive_a_resume_in_their_order(tmp_path):
    run = Fixture(tmp_path, dict.fromkeys("abcdef", 1.0), per_step=1, lag=0, num_ahead_groups=3)
    run_virtual(run.steps(2))
    state = run.worker.state_dict()["scheduler"]
    assert len(state["waiting"]) == 3
    again = Scheduler.from_state_dict(state, run.worker.config.scheduler)
    assert again.waiting == run.worker.scheduler.waiting
    assert again == run.worker.scheduler


@pytest.mark.parametrize(
    ("valid_after_s", "elapsed", "left"),
    [([], 9.0, None), ([1.0], 9.0, None), ([1.0, 3.0], 3.0, 3.0), ([1.0, 3.0], 9.0, 0.0)],
)
def test_a_group_closes_a_factor_after_the_median_of_its_first_half(valid_after_s, elapsed, left):
    rule = ClosingRule(num_wanted=4, factor=3.0, valid_after_s=list(valid_after_s))
    assert rule.left_s(elapsed) == left
    assert not rule.is_enough()


def test_over_sampled_groups_end_with_enough_and_show_what_was_cut_off():
    async def play(name):
        number = int(name.rsplit("-e", 1)[1])
        await asyncio.sleep(10.0 * (number + 1))
        return episode("t", "g", name)

    group = run_virtual(
        run_group(
            play, group_id="g", task_id="t", num_episodes=2, max_retries=0, admitted_version=0, num_extra=2
        )
    )
    assert [e.stop_reason for e in group.episodes] == ["terminated", "terminated", "cancelled", "cancelled"]
    assert [e.is_valid for e in group.episodes] == [True, True, False, False]
