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
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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


@dataclass
class Scheduler:
    """Admitted, finished, trained and dropped groups of a run. `state_dict` restores it exactly."""

    groups_per_step: int
    max_policy_lag: int = 1
    version: int = 0
    num_admitted: int = 0
    num_dropped: int = 0
    groups: dict[str, GroupState] = field(default_factory=dict)
    """Admitted and neither trained nor dropped, in admission order."""

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_policy_lag < 0:
            raise ValueError(
                f"groups_per_step must be at least 1 and max_policy_lag at least 0, "
                f"not {self.groups_per_step} and {self.max_policy_lag}"
            )

    def capacity(self) -> int:
        """How many groups may be admitted now."""
        limit = (self.version + self.max_policy_lag + 1) * self.groups_per_step
        return max(0, limit - (self.num_admitted - self.num_dropped))

    def admit(self, group_id: str, task_id: str) -> GroupState:
        """Count one more group. Raises RuntimeError beyond the capacity: that would break the lag bound."""
        if self.capacity() < 1:
            raise RuntimeError(
                f"group {group_id} would be admitted beyond the lag bound; ask capacity() first"
            )
        if group_id in self.groups:
            raise RuntimeError(f"group {group_id} is admitted already")
        state = GroupState(group_id, task_id, self.num_admitted)
        self.groups[group_id] = state
        self.num_admitted += 1
        return state

    def record_version(self, group_id: str, version: int) -> None:
        """A token of the group was sampled under `version`."""
        state = self.groups.get(group_id)
        if state is not None:
            state.oldest_version = (
                version if state.oldest_version is None else min(state.oldest_version, version)
            )

    def finish(self, group_id: str) -> None:
        """All episodes of the group are in."""
        self.groups[group_id].is_finished = True

    def drop(self, group_id: str) -> None:
        """The group cannot be trained (invalid, or filtered); its place is free again."""
        del self.groups[group_id]
        self.num_dropped += 1

    def deadline(self, group: GroupState) -> int | None:
        """The last version whose step may train the group; None while it holds no token."""
        return None if group.oldest_version is None else group.oldest_version + self.max_policy_lag

    def next_batch(self) -> list[str] | None:
        """Ids of the B groups of the next step, or None while it has to wait. Changes nothing."""

        def urgency(group: GroupState) -> tuple[float, int]:
            due = self.deadline(group)
            return (float("inf") if due is None else due, group.order)

        finished = sorted((g for g in self.groups.values() if g.is_finished), key=urgency)
        if len(finished) < self.groups_per_step:
            return None
        batch = [group.group_id for group in finished[: self.groups_per_step]]
        left = [self.deadline(g) for g in self.groups.values() if g.group_id not in batch]
        for k in range(self.max_policy_lag + 1):
            if sum(due is not None and due <= self.version + k for due in left) > k * self.groups_per_step:
                return None
        return batch

    def trained(self, group_ids: list[str]) -> None:
        """The step over `group_ids` is done: they leave, the version goes up."""
        for group_id in group_ids:
            del self.groups[group_id]
        self.version += 1

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state. In-flight groups are in it: after a resume they are run again from their tasks."""
        return {
            "groups_per_step": self.groups_per_step,
            "max_policy_lag": self.max_policy_lag,
            "version": self.version,
            "num_admitted": self.num_admitted,
            "num_dropped": self.num_dropped,
            "groups": [vars(group) for group in self.groups.values()],
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Scheduler:
        """The scheduler that `state` was taken from."""
        groups = {group["group_id"]: GroupState(**group) for group in state["groups"]}
        return cls(**{**state, "groups": groups})
