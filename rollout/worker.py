"""The rollout side of a run: draws tasks, admits groups, runs episodes, hands out finished groups in the right order.

    worker.start(); batch = await worker.next_batch(); (train) ; worker.trained(batch)

While the trainer works, admitted groups go on: nothing here waits for a whole batch. What decides the future (sampler,
scheduler, counters) is in `state_dict`; episodes and groups are on disk before anyone hears of them.

Exact resume: between two states everything follows from the state and the groups that the store got after it, in their
order, so that `restore` comes to the same draws. For that a state is taken in one go with the admissions of its step
(`commit`), and groups admitted since are not started before that state is on disk (`release`).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rollout.group import run_group
from rollout.scheduler import GroupState, Scheduler
from slime_cua.algo.samplers import TaskSampler
from slime_cua.config.rollout import RolloutConfig
from slime_cua.core.errors import ConfigError, InfrastructureError
from slime_cua.core.types import Episode, EpisodeGroup, Task
from slime_cua.data.episodes import EpisodeStore, OpenGroups

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
    open_groups: OpenGroups | None = None
    """Keeps the finished episodes of running groups; None: an interrupted group starts over."""
    serving_version: int = 0
    """Tokens sampled from now on are of this version or a later one."""
    num_stored: int = 0
    """Groups in the store."""
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _finished: dict[str, EpisodeGroup] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)
    """Where the lines of finished groups begin in the store."""
    _admitted: list[GroupState] = field(default_factory=list)
    """Not started yet."""
    _dropped: list[str] = field(default_factory=list)
    """Dropped while held: what is kept of them goes at `release`."""
    _is_held: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: BaseException | None = None
    _drops_in_a_row: int = 0
    _stored_bytes: int = 0
    """End of the last whole line in the store."""
    failures: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By task whose last group had too few valid episodes: how often in a row, and num_stored then."""
    quarantined: list[str] = field(default_factory=list)
    """Tasks that are not drawn any more: max_task_failures of their groups failed in a row."""

    def start(self) -> None:
        """Admit up to the bound and start what is admitted."""
        self.hold()
        self.release()

    def hold(self) -> None:
        """Admit up to the bound, and start nothing before `release`. Raises ConfigError for an empty pool."""
        if not self.sampler.task_ids:
            raise ConfigError("there is no task to draw: tasks.train names none")
        self._is_held = True
        self.admit()

    def release(self) -> None:
        """The state with what was admitted so far is on disk and the weights of its version are out: start the groups."""
        self._is_held = False
        self.serving_version = self.scheduler.version
        for group_id in self._dropped:
            self._forget_open(group_id)
        self._dropped.clear()
        self._start_admitted()

    def restore(self, state: dict[str, Any]) -> int:
        """Become what `state_dict` described, and then what the groups stored since make of it, before `start`.

        Sampler and scheduler must have their parts of `state` already. Groups in the store that do not follow from it are
        cut off; gives how many bytes those were. Raises DataError when a finished group is not in the store.
        """
        self._is_held = True
        self.store.mend()
        self.num_stored, self._drops_in_a_row = state["num_stored"], state["drops_in_a_row"]
        self.failures = {task: (count, at) for task, (count, at) in state.get("failures", {}).items()}
        self.quarantined = list(state.get("quarantined", ()))
        for group_id, place in state["finished"].items():
            self._places[group_id] = place
            self._finished[group_id] = self.store.read_at(place, group_id)
        for place, group in self.store.since(state["store_bytes"]):
            if not self._follows(group):
                num_bytes = self.store.num_bytes - place
                self.store.cut(place)
                break
            self._settle(group, place)
        else:
            num_bytes = 0
        self._stored_bytes = self.store.num_bytes
        self._admitted = [group for group in self.scheduler.groups.values() if not group.is_finished]
        for running in self._admitted:
            running.oldest_version = min(_versions(self._open_episodes(running)), default=None)
        if self.open_groups is not None:
            self.open_groups.keep_only({running.group_id for running in self._admitted})
        return num_bytes

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
        self.commit(group_ids)
        self.release()

    def commit(self, group_ids: list[str]) -> dict[str, Any]:
        """The optimiser step over these groups is done: its state, admissions included. Nothing starts before `release`.

        The state also has `trained`: {group id: its place in the store}.
        """
        self._is_held = True
        stale = self.scheduler.trained(group_ids)
        trained = {group_id: self._places.pop(group_id) for group_id in group_ids}
        for group_id in group_ids:
            del self._finished[group_id]
        for group in stale:
            self._abandon(group)
        self.admit()
        return {**self.state_dict(), "trained": trained}

    async def stop(self) -> None:
        """Cancel what runs; desktops go back by their context managers."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready; `restore` and the parts' own loaders take it."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "finished": {group_id: self._places[group_id] for group_id in self._finished},
            "store_bytes": self._stored_bytes,
            "num_stored": self.num_stored,
            "drops_in_a_row": self._drops_in_a_row,
            "failures": {task: list(entry) for task, entry in self.failures.items()},
            "quarantined": list(self.quarantined),
        }

    def _abandon(self, group: GroupState) -> None:
        """The scheduler dropped the group: what runs of it ends, its desktops go back."""
        self._finished.pop(group.group_id, None)
        self._places.pop(group.group_id, None)
        self._dropped.append(group.group_id)
        if not group.is_finished:
            self.sampler.release(group.task_id)
        if group.group_id in self._running:
            self._running[group.group_id].cancel()

    def admit(self) -> None:
        """Draw and start groups up to the scheduler's capacity. Safe at any time."""
        while (wanted := self.scheduler.num_to_draw()) > 0:
            self.scheduler.enqueue(self.sampler.sample(min(wanted, len(self.sampler.task_ids))))
        for task_id in self.scheduler.dequeue():
            group_id = f"g{self.scheduler.num_admitted:06d}"
            self._admitted.append(self.scheduler.admit(group_id, task_id))
        if not self._is_held:
            self._start_admitted()

    def _start_admitted(self) -> None:
        for group in self._admitted:
            if group.group_id in self.scheduler.groups and group.group_id not in self._running:
                self._running[group.group_id] = asyncio.create_task(self._run(group), name=group.group_id)
        self._admitted.clear()

    async def _run(self, group: GroupState) -> None:
        group_id, task_id = group.group_id, group.task_id
        try:
            self._close(
                await run_group(
                    lambda episode_id: self._play(group, episode_id),
                    group_id=group_id,
                    task_id=task_id,
                    num_episodes=self.config.episodes_per_group,
                    max_retries=self.config.max_infra_retries,
                    admitted_version=group.admitted_version,
                    num_extra=self.config.scheduler.num_extra_episodes,
                    close_factor=self.config.scheduler.close_factor,
                    finished=self._open_episodes(group),
                )
            )
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = error
        finally:
            self._running.pop(group_id, None)
            self._changed.set()

    async def _play(self, group: GroupState, episode_id: str) -> Episode:
        episode = await self.play(
            self.tasks[group.task_id],
            group.group_id,
            episode_id,
            lambda: self.scheduler.record_version(group.group_id, self.serving_version),
        )
        if self.open_groups is not None and group.group_id in self.scheduler.groups:
            self.open_groups.append(episode)
        return episode

    def _close(self, group: EpisodeGroup) -> None:
        """The group's last episode is in: store it, then let it count."""
        self.store.append(group)
        self._stored_bytes = self.store.num_bytes
        self._forget_open(group.group_id)
        self._settle(group, self.store.last_start)
        if self._drops_in_a_row >= MAX_CONSECUTIVE_DROPS:
            reasons = sorted({episode.error or "?" for episode in group.episodes})
            raise InfrastructureError(
                f"{self._drops_in_a_row} groups in a row had no two valid episodes; the last failures were: "
                + "; ".join(reasons)
            )

    def _settle(self, group: EpisodeGroup, place: int) -> None:
        """What a stored group changes. Follows from state and group alone: `restore` does it again."""
        self.num_stored += 1
        valid = [episode.reward for episode in group.episodes if episode.is_valid]
        versions = _versions(group.episodes)
        if (
            versions
        ):  # now known exactly; a request may have been answered under newer weights than it was sent to
            self.scheduler.groups[group.group_id].oldest_version = min(versions)
        self.sampler.update({group.task_id: [e.reward if e.is_valid else None for e in group.episodes]})
        if len(valid) < MIN_VALID_EPISODES:
            self.scheduler.drop(group.group_id)
            self._drops_in_a_row += 1
            self._note_failure(group.task_id)
            self.admit()
            return
        self._drops_in_a_row = 0
        self.failures.pop(group.task_id, None)
        self.scheduler.record_duration(group.task_id, _duration_s(group))
        if self.scheduler.finish(group.group_id, is_flat=len(set(valid)) < 2):
            self._finished[group.group_id] = group
            self._places[group.group_id] = place
        else:
            self.admit()

    def _note_failure(self, task_id: str) -> None:
        """Draw a task no more that fails again and again: a sampler that never hears of it would draw it for ever.

        It counts only what failed while others came through: an outage is no fault of the tasks, and ends the run by
        MAX_CONSECUTIVE_DROPS. So the last task of a pool is never quarantined.
        """
        count, at = self.failures.get(task_id, (0, 0))
        is_outage = count > 0 and self._drops_in_a_row >= self.num_stored - at
        count += not is_outage
        self.failures[task_id] = (count, self.num_stored)
        limit = self.config.scheduler.max_task_failures
        others = len(self.sampler.task_ids) - (task_id in self.sampler.task_ids)
        if limit and count >= limit and others and task_id in self.sampler.task_ids:
            self.sampler.remove_tasks([task_id])
            for _ in range(self.scheduler.forget_waiting(task_id)):
                self.sampler.release(task_id)
            self.quarantined.append(task_id)

    def _follows(self, group: EpisodeGroup) -> bool:
        """The state waits for this very group, and only its own or older weights sampled it."""
        state = self.scheduler.groups.get(group.group_id)
        if state is None or state.is_finished or state.task_id != group.task_id:
            return False
        return max(_versions(group.episodes), default=0) <= self.scheduler.version

    def _open_episodes(self, group: GroupState) -> list[Episode]:
        if self.open_groups is None:
            return []
        kept = self.open_groups.episodes(group.group_id, group.task_id)
        return [e for e in kept if max(_versions([e]), default=0) <= self.scheduler.version]

    def _forget_open(self, group_id: str) -> None:
        if self.open_groups is not None:
            self.open_groups.close(group_id)


def _versions(episodes: Iterable[Episode]) -> list[int]:
    """Versions of all sampled tokens."""
    return [v for episode in episodes for turn in episode.turns for v in turn.response_versions]


def _duration_s(group: EpisodeGroup) -> float:
    """Geometric mean over the valid attempts: of a group's times the one that says most of the next group's longest."""
    took_s = (episode.ended_s - episode.started_s for episode in group.episodes if episode.is_valid)
    return statistics.geometric_mean(max(1e-3, seconds) for seconds in took_s)
