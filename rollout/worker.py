"""The rollout side of a run: draws tasks, admits groups, runs episodes, hands out finished groups in the right order.

    worker.start(); batch = await worker.next_batch(); (train) ; worker.trained(batch)

While the trainer works, admitted groups go on: nothing here waits for a whole batch. What decides the future (sampler,
scheduler, counters) is in `state_dict`; finished groups are on disk before anyone hears of them.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rollout.group import run_group
from rollout.scheduler import Scheduler
from slime_cua.algo.samplers import TaskSampler
from slime_cua.config.rollout import RolloutConfig
from slime_cua.core.errors import SlimeCuaError
from slime_cua.core.types import Episode, EpisodeGroup, Task
from slime_cua.data.episodes import EpisodeStore

PlayEpisode = Callable[[Task, str, str, Callable[[], None]], Awaitable[Episode]]
"""(task, group_id, episode_id, on_request) -> episode; on_request is called before each request to the policy."""
MIN_VALID_EPISODES = 2
"""A group with fewer has no baseline: it is dropped and counted."""
MAX_CONSECUTIVE_DROPS = 12
"""So many groups dropped in a row mean that the desktops or engines are broken, not the tasks."""


@dataclass
class RolloutWorker:
    """Owns admission and the running groups of one run; all methods belong to one event loop."""

    config: RolloutConfig
    tasks: dict[str, Task]
    sampler: TaskSampler
    scheduler: Scheduler
    store: EpisodeStore
    play: PlayEpisode
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _finished: dict[str, EpisodeGroup] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: BaseException | None = None
    _drops_in_a_row: int = 0

    def start(self) -> None:
        """Admit up to the bound. Groups that were in flight when the state was saved run again from their tasks."""
        for group in list(self.scheduler.groups.values()):
            if not group.is_finished and group.group_id not in self._running:
                group.oldest_version = None
                self._launch(group.group_id, group.task_id)
        self.admit()

    def restore_finished(self, groups: Iterable[EpisodeGroup]) -> None:
        """Take back groups that were finished and not trained (from the store, after a resume), before `start`."""
        for group in groups:
            state = self.scheduler.groups.get(group.group_id)
            if state is None or group.group_id in self._finished:
                continue
            versions = [v for e in group.episodes for t in e.turns for v in t.response_versions]
            if versions and max(versions) > self.scheduler.version:
                continue  # sampled by weights that the crash took away: run again
            if versions:
                self.scheduler.record_version(group.group_id, min(versions))
            self._finished[group.group_id] = group
            self.scheduler.finish(group.group_id)

    async def next_batch(self) -> list[EpisodeGroup]:
        """The groups of the next optimiser step. Raises what broke the rollout, if anything did."""
        while True:
            if self._failure is not None:
                raise self._failure
            batch = self.scheduler.next_batch()
            if batch is not None:
                return [self._finished[group_id] for group_id in batch]
            self._changed.clear()
            await self._changed.wait()

    def trained(self, group_ids: list[str]) -> None:
        """The optimiser step over these groups is done and the new weights are out: admit more."""
        stale = self.scheduler.trained(group_ids)
        for group_id in group_ids:
            del self._finished[group_id]
        for group in stale:
            self._abandon(group.group_id, group.task_id)
        self.admit()

    async def stop(self) -> None:
        """Cancel what runs; desktops go back by their context managers."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict(), "sampler": self.sampler.state_dict()}

    def _abandon(self, group_id: str, task_id: str) -> None:
        """The scheduler dropped the group: what runs of it ends, its desktops go back."""
        self._finished.pop(group_id, None)
        if group_id in self._running:
            self._running[group_id].cancel()
            self.sampler.release(task_id)

    def admit(self) -> None:
        """Draw and start groups up to the scheduler's capacity. Safe at any time."""
        while (wanted := self.scheduler.num_to_draw()) > 0:
            self.scheduler.enqueue(self.sampler.sample(min(wanted, len(self.tasks))))
        for task_id in self.scheduler.dequeue():
            group_id = f"g{self.scheduler.num_admitted:06d}"
            self.scheduler.admit(group_id, task_id)
            self._launch(group_id, task_id)

    def _launch(self, group_id: str, task_id: str) -> None:
        self._running[group_id] = asyncio.create_task(self._run(group_id, task_id), name=group_id)

    async def _run(self, group_id: str, task_id: str) -> None:
        try:
            group = await run_group(
                lambda episode_id: self.play(
                    self.tasks[task_id],
                    group_id,
                    episode_id,
                    lambda: self.scheduler.record_version(group_id, self.scheduler.version),
                ),
                group_id=group_id,
                task_id=task_id,
                num_episodes=self.config.episodes_per_group,
                max_retries=self.config.max_infra_retries,
                admitted_version=self.scheduler.version,
                num_extra=self.config.scheduler.num_extra_episodes,
                close_factor=self.config.scheduler.close_factor,
            )
            self._close(group)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = error
        finally:
            self._running.pop(group_id, None)
            self._changed.set()

    def _close(self, group: EpisodeGroup) -> None:
        self.store.append(group)
        valid = [episode.reward for episode in group.episodes if episode.is_valid]
        self.sampler.update({group.task_id: [e.reward if e.is_valid else None for e in group.episodes]})
        if len(valid) < MIN_VALID_EPISODES:
            self.scheduler.drop(group.group_id)
            self._drops_in_a_row += 1
            if self._drops_in_a_row >= MAX_CONSECUTIVE_DROPS:
                reasons = sorted({episode.error or "?" for episode in group.episodes})
                raise SlimeCuaError(
                    f"{self._drops_in_a_row} groups in a row had no two valid episodes; the last failures were: "
                    + "; ".join(reasons)
                )
            self.admit()
            return
        self._drops_in_a_row = 0
        self.scheduler.record_duration(group.task_id, _duration_s(group))
        if self.scheduler.finish(group.group_id, is_flat=len(set(valid)) < 2):
            self._finished[group.group_id] = group
        else:
            self.admit()


def _duration_s(group: EpisodeGroup) -> float:
    """Geometric mean over the valid attempts: of a group's times the one that says most of the next group's longest."""
    took_s = (episode.ended_s - episode.started_s for episode in group.episodes if episode.is_valid)
    return statistics.geometric_mean(max(1e-3, seconds) for seconds in took_s)
