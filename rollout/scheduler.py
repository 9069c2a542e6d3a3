"""Admission and batch choice: bounded lag without throwing work away. Pure bookkeeping, no clock, no I/O.

Let B be groups_per_step, v the trainer's version (steps done), L max_policy_lag.

    admit while   admitted - dropped < (v + L + 1) * B

A group whose oldest token has version u can be trained until step u + L: that is its deadline. Step v -> v+1 takes the
B finished groups with the earliest deadlines (a group that holds a token older than v + 1 - L is always among them),
and it waits for running groups as long as, after it, some number k of further steps could not hold all groups due
within them: for each k = 0..L, groups left with deadline <= v + k must be at most k * B.

It never deadlocks: at version v at most (L + 1) * B groups are outstanding, every token sampled now has deadline
v + L, so the same bound with k + 1 in place of k holds before each step, and once all groups have finished, taking
the B earliest deadlines restores it. So no token is ever dropped for its age (I6). L = 0 is the synchronous schedule.
For L = 1 the rule is the plain one: groups with tokens older than v go first, and the step waits for them.

That is `stale = wait`. With `mask` a step needs B finished groups and nothing else, and what is older than v - L is
not trained (`oldest_trainable`). With `drop` a step waits for protected groups only, by the same rule; others that no
later step may train are dropped when it is done. A task that lost `max_task_drops` groups in a row gets a protected
one, and at most (L + 1) * B groups are protected at once, so `drop` starves no task and does not deadlock either.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slime_cua.config.rollout import SchedulerConfig

DURATION_RETENTION = 0.5
"""Share of the old estimate that stays when a task's duration was measured again."""


@dataclass
class GroupState:
    """What the scheduler knows of one admitted group."""

    group_id: str
    task_id: str
    order: int
    """Admission number, from 0."""
    oldest_version: int | None = None
    """Least version of any token sampled so far; None before the first."""
    is_finished: bool = False
    is_protected: bool = True
    """The step waits for it; without `stale = drop` that is every group."""
    admitted_version: int = 0
    """The scheduler's version when it was admitted."""


@dataclass
class Scheduler:
    """Admitted, finished, trained and dropped groups of a run. `state_dict` restores it exactly."""

    groups_per_step: int
    max_policy_lag: int = 1
    version: int = 0
    num_admitted: int = 0
    num_dropped: int = 0
    """All that left untrained: too few valid episodes, stale, filtered."""
    groups: dict[str, GroupState] = field(default_factory=dict)
    """Admitted and neither trained nor dropped, in admission order."""
    options: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_stale: int = 0
    """Of the dropped: for their age."""
    num_masked: int = 0
    """Trained groups that held turns too old to train."""
    num_filtered: int = 0
    """Of the dropped: all episodes scored the same."""
    num_flat_kept: int = 0
    """Flat groups trained because max_filtered_per_step was reached."""
    filtered_this_step: int = 0
    durations_s: dict[str, float] = field(default_factory=dict)
    """Measured duration of each task's groups."""
    waiting: list[str] = field(default_factory=list)
    """Tasks drawn and not admitted yet, in draw order."""
    round_at_s: float = math.inf
    """The round of `dequeue` has come to tasks of this duration."""
    round_ties: int = 0
    """How many more of just this duration the round takes: those that waited when it came there."""
    stale_in_a_row: dict[str, int] = field(default_factory=dict)
    """Tasks whose last groups were dropped for their age."""

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_policy_lag < 0:
            raise ValueError(
                f"groups_per_step must be at least 1 and max_policy_lag at least 0, "
                f"not {self.groups_per_step} and {self.max_policy_lag}"
            )

    def capacity(self) -> int:
        """How many groups may be admitted now."""
        limit = (self.version + self.max_policy_lag + 1) * self.groups_per_step
        limit += self.options.num_extra_groups
        return max(0, limit - (self.num_admitted - self.num_dropped))

    def admit(self, group_id: str, task_id: str) -> GroupState:
        """Count one more group. Raises RuntimeError beyond the capacity: that would break the lag bound."""
        if self.capacity() < 1:
            raise RuntimeError(
                f"group {group_id} would be admitted beyond the lag bound; ask capacity() first"
            )
        if group_id in self.groups:
            raise RuntimeError(f"group {group_id} is admitted already")
        state = GroupState(
            group_id,
            task_id,
            self.num_admitted,
            is_protected=self._protects(task_id),
            admitted_version=self.version,
        )
        self.groups[group_id] = state
        self.num_admitted += 1
        return state

    def num_to_draw(self) -> int:
        """How many tasks the sampler should draw now, so that all places are taken and num_ahead_groups are held."""
        return max(0, self.capacity() + self.options.num_ahead_groups - len(self.waiting))

    def enqueue(self, task_ids: Iterable[str]) -> None:
        """Tasks that were drawn; `dequeue` says when they start."""
        self.waiting.extend(task_ids)

    def dequeue(self) -> list[str]:
        """Waiting tasks that may be admitted now, in the order in which to start them.

        Longest measured duration first, unknown ones as the mean; a round goes on to shorter ones and new tasks that are
        longer, or just as long as where the round is, wait for the next one: so rounds end, and each task starts after at
        most two. A round also ends when nothing waits. Without is_long_first: as drawn.
        """
        room = min(self.capacity(), len(self.waiting))
        if not self.options.is_long_first:
            taken, self.waiting = self.waiting[:room], self.waiting[room:]
            return taken
        mean = sum(self.durations_s.values()) / max(1, len(self.durations_s))
        durations = [self.durations_s.get(task, mean) for task in self.waiting]
        taken = []
        for _ in range(room):
            ahead = [duration for duration in durations if self._is_in_round(duration)]
            longest = max(ahead or durations)
            if not ahead or longest < self.round_at_s:
                self.round_at_s, self.round_ties = longest, durations.count(longest)
            self.round_ties -= 1
            index = durations.index(longest)
            durations.pop(index)
            taken.append(self.waiting.pop(index))
        if not self.waiting:
            self.round_at_s = math.inf
        return taken

    def _is_in_round(self, duration: float) -> bool:
        return duration < self.round_at_s or (duration == self.round_at_s and self.round_ties > 0)

    def forget_waiting(self, task_id: str) -> int:
        """A task must not start any more: how many waiting draws of it went."""
        kept = [task for task in self.waiting if task != task_id]
        num_gone, self.waiting = len(self.waiting) - len(kept), kept
        return num_gone

    def record_version(self, group_id: str, version: int) -> None:
        """A token of the group was, or is about to be, sampled under `version`."""
        state = self.groups.get(group_id)
        if state is not None and (state.oldest_version is None or version < state.oldest_version):
            state.oldest_version = version

    def record_duration(self, task_id: str, seconds: float) -> None:
        """A group of the task took so long from its start to its last episode."""
        known = self.durations_s.get(task_id, seconds)
        self.durations_s[task_id] = DURATION_RETENTION * known + (1 - DURATION_RETENTION) * seconds

    def finish(self, group_id: str, is_flat: bool = False) -> bool:
        """All episodes of the group are in; `is_flat`: they all scored the same. False if it was filtered (dropped)."""
        if is_flat and self.options.filters_flat_groups:
            if self.filtered_this_step < self.options.max_filtered_per_step:
                self.filtered_this_step += 1
                self.num_filtered += 1
                self.drop(group_id)
                return False
            self.num_flat_kept += 1
        self.groups[group_id].is_finished = True
        return True

    def drop(self, group_id: str) -> None:
        """The group cannot be trained (invalid, or filtered); its place is free again."""
        del self.groups[group_id]
        self.num_dropped += 1

    def deadline(self, group: GroupState) -> int | None:
        """The last version whose step may train the group; None while it holds no token."""
        return None if group.oldest_version is None else group.oldest_version + self.max_policy_lag

    @property
    def oldest_trainable(self) -> int:
        """Tokens of lower versions are too old for the step from `version`."""
        return self.version - self.max_policy_lag

    def next_batch(self) -> list[str] | None:
        """Ids of the B groups of the next step, or None while it has to wait. Changes nothing."""
        finished = [group for group in self.groups.values() if group.is_finished]
        if len(finished) < self.groups_per_step:
            return None
        finished.sort(key=self._urgency)
        batch = [group.group_id for group in finished[: self.groups_per_step]]
        if self.options.stale == "mask" or self._later_steps_suffice(batch):
            return batch
        if self.options.stale == "drop":
            finished.sort(key=lambda group: not group.is_protected)
            batch = [group.group_id for group in finished[: self.groups_per_step]]
            return batch if self._later_steps_suffice(batch) else None
        return None

    def trained(self, group_ids: Sequence[str]) -> list[GroupState]:
        """The step over `group_ids` is done: they leave, the version goes up. Gives groups dropped for their age."""
        for group_id in group_ids:
            group = self.groups.pop(group_id)
            self.num_masked += (
                group.oldest_version is not None and group.oldest_version < self.oldest_trainable
            )
            self.stale_in_a_row.pop(group.task_id, None)
        self.version += 1
        self.filtered_this_step = 0
        return self._drop_stale() if self.options.stale == "drop" else []

    def _protects(self, task_id: str) -> bool:
        if self.options.stale != "drop":
            return True
        room = (self.max_policy_lag + 1) * self.groups_per_step
        is_unlucky = self.stale_in_a_row.get(task_id, 0) >= self.options.max_task_drops
        return is_unlucky and sum(group.is_protected for group in self.groups.values()) < room

    def _urgency(self, group: GroupState) -> tuple[float, int]:
        due = self.deadline(group)
        return (float("inf") if due is None else due, group.order)

    def _later_steps_suffice(self, batch: list[str]) -> bool:
        """Whether, after a step over `batch`, each next k steps can hold the protected groups due within them.

        A group without a token may get its first one while this step runs: it counts as if it had.
        """
        leaving = set(batch)
        due_within = [0] * (self.max_policy_lag + 1)
        for group in self.groups.values():
            if not group.is_protected or group.group_id in leaving:
                continue
            oldest = self.version if group.oldest_version is None else group.oldest_version
            k = max(0, oldest + self.max_policy_lag - self.version)
            if k <= self.max_policy_lag:
                due_within[k] += 1
        total = 0
        for k, count in enumerate(due_within):
            total += count
            if total > k * self.groups_per_step:
                return False
        return True

    def _drop_stale(self) -> list[GroupState]:
        stale = [
            group
            for group in self.groups.values()
            if group.oldest_version is not None and group.oldest_version < self.oldest_trainable
        ]
        for group in stale:
            self.drop(group.group_id)
            self.num_stale += 1
            self.stale_in_a_row[group.task_id] = self.stale_in_a_row.get(group.task_id, 0) + 1
        return stale

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state. In-flight groups are in it: after a resume they go on with the episodes that had finished."""
        state = asdict(self)
        state["groups"] = [vars(group).copy() for group in self.groups.values()]
        del state["options"]
        state["round_at_s"] = None if math.isinf(self.round_at_s) else self.round_at_s
        return state

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], options: SchedulerConfig | None = None) -> Scheduler:
        """The scheduler that `state` was taken from; options are the config's, not the state's. `state` stays its owner's."""
        state = copy.deepcopy(state)
        groups = {group["group_id"]: GroupState(**group) for group in state["groups"]}
        round_at_s = state.get("round_at_s")
        own = {"groups": groups, "round_at_s": math.inf if round_at_s is None else round_at_s}
        return cls(**{**state, **own}, options=options or SchedulerConfig())
