"""What is compared: our scheduler under several bounds and options, and how others schedule, as schedulers of the same shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollout.scheduler import GroupState, Scheduler
from slime_cua.config.rollout import SchedulerConfig


@dataclass
class BarrierScheduler(Scheduler):
    """One step off: while a step runs the next rollout is collected, and new weights wait until it is whole."""

    steps_started: int = 0

    def capacity(self) -> int:
        limit = (self.steps_started + 1) * self.groups_per_step
        return max(0, limit - (self.num_admitted - self.num_dropped))

    def next_batch(self) -> list[str] | None:
        """All groups, once all are finished."""
        is_whole = len(self.groups) == self.groups_per_step
        return list(self.groups) if is_whole and self.is_collected() else None

    def is_collected(self) -> bool:
        return all(group.is_finished for group in self.groups.values())

    def trained(self, group_ids: Sequence[str]) -> list[GroupState]:
        for group_id in group_ids:
            del self.groups[group_id]
        self.version += 1
        return []


@dataclass
class FreeScheduler(Scheduler):
    """Fully asynchronous: so many groups are always in flight, a step takes what finished first, however old it is."""

    num_in_flight: int = 1
    finish_order: dict[str, None] = field(default_factory=dict)

    def capacity(self) -> int:
        return max(0, self.num_in_flight - sum(not group.is_finished for group in self.groups.values()))

    def finish(self, group_id: str, is_flat: bool = False) -> bool:
        self.finish_order[group_id] = None
        self.groups[group_id].is_finished = True
        return True

    def drop(self, group_id: str) -> None:
        self.finish_order.pop(group_id, None)
        super().drop(group_id)

    def next_batch(self) -> list[str] | None:
        if len(self.finish_order) < self.groups_per_step:
            return None
        return list(self.finish_order)[: self.groups_per_step]

    def trained(self, group_ids: Sequence[str]) -> list[GroupState]:
        for group_id in group_ids:
            del self.groups[group_id], self.finish_order[group_id]
        self.version += 1
        return []


@dataclass
class DiscardScheduler(FreeScheduler):
    """The same, and what has become older than the bound is thrown away when it is looked at: after it was paid for."""

    def finish(self, group_id: str, is_flat: bool = False) -> bool:
        if self._is_stale(self.groups[group_id]):
            self.num_stale += 1
            self.drop(group_id)
            return False
        return super().finish(group_id, is_flat)

    def trained(self, group_ids: Sequence[str]) -> list[GroupState]:
        super().trained(group_ids)
        stale = [group for group in self.groups.values() if group.is_finished and self._is_stale(group)]
        for group in stale:
            self.num_stale += 1
            self.drop(group.group_id)
        return stale

    def _is_stale(self, group: GroupState) -> bool:
        return group.oldest_version is not None and group.oldest_version < self.oldest_trainable


@dataclass
class ForeseeingScheduler(Scheduler):
    """Ours with durations from the trace instead of measured ones: what better estimates could give."""

    def record_duration(self, task_id: str, seconds: float) -> None:
        """Nothing is learnt from what was measured."""

    def foresee(self, task_id: str, seconds: float) -> None:
        self.durations_s[task_id] = seconds


@dataclass(frozen=True)
class Policy:
    """A row of the comparison. `make(groups_per_step, num_in_flight)` gives its scheduler."""

    name: str
    make: Callable[[int, int], Scheduler]
    max_lag: int | None
    """The bound that it promises; None: none."""
    options: SchedulerConfig = field(default_factory=SchedulerConfig)
    has_no_discard: bool = False
    """Keeps every group that it admits, so that the bound on trainer idleness holds for it."""
    foresight: Literal["", "tasks", "groups"] = ""
    """What it is told of durations, beyond one earlier group of each task: each task's mean, or what each group will take."""


def ours(max_lag: int, name: str = "", **options: object) -> Policy:
    """Our scheduler with a bound and options."""
    config = SchedulerConfig.model_validate(options)
    return Policy(
        name or f"ours, lag {max_lag}",
        lambda per_step, _: Scheduler(per_step, max_lag, options=config),
        max_lag,
        config,
        has_no_discard=not set(options) - {"num_ahead_groups", "is_long_first"},
    )


def _foreseeing(foresight: Literal["tasks", "groups"], name: str, num_ahead: int) -> Policy:
    options = SchedulerConfig(num_ahead_groups=num_ahead)
    return Policy(
        name,
        lambda per_step, _: ForeseeingScheduler(per_step, 1, options=options),
        1,
        options,
        has_no_discard=True,
        foresight=foresight,
    )


POLICIES: dict[str, Policy] = {
    "sync": Policy("synchronous", lambda per_step, _: Scheduler(per_step, 0), 0, has_no_discard=True),
    "one_step_off": Policy(
        "one step off, whole-rollout barrier",
        lambda per_step, _: BarrierScheduler(per_step, 1),
        1,
        has_no_discard=True,
    ),
    "unbounded": Policy(
        "fully asynchronous, no bound", lambda per_step, n: FreeScheduler(per_step, 1, num_in_flight=n), None
    ),
    "discard": Policy(
        "discard when older than 1", lambda per_step, n: DiscardScheduler(per_step, 1, num_in_flight=n), 1
    ),
    "ours_1": ours(1),
    "ours_2": ours(2),
    "ours_4": ours(4),
    "ours_1_ahead_16": ours(1, "ours, lag 1, 16 drawn ahead", num_ahead_groups=16),
    "ours_1_ahead": ours(1, "ours, lag 1, 64 drawn ahead", num_ahead_groups=64),
    "ours_1_ahead_256": ours(1, "ours, lag 1, 256 drawn ahead", num_ahead_groups=256),
    "tasks_known": _foreseeing("tasks", "the same, 256 ahead, each task's mean known", 256),
    "foreseeing_64": _foreseeing("groups", "the same, 64 ahead, durations foreseen", 64),
    "foreseeing": _foreseeing("groups", "the same, 256 ahead, durations foreseen", 256),
    "ours_mask": ours(1, "ours, lag 1, mask", stale="mask"),
    "ours_drop": ours(1, "ours, lag 1, drop", stale="drop"),
    "ours_oversample": ours(1, "ours, lag 1, 2 extra episodes", num_extra_episodes=2),
    "ours_early_close": ours(1, "ours, lag 1, close at 2x median", close_factor=2.0),
}
DEFAULT = (
    "sync",
    "one_step_off",
    "unbounded",
    "discard",
    "ours_1",
    "ours_1_ahead_16",
    "ours_1_ahead",
    "ours_2",
    "ours_4",
)
FORESIGHT = ("ours_1_ahead_256", "tasks_known", "foreseeing_64", "foreseeing")
OPTIONS = ("ours_mask", "ours_drop", "ours_oversample", "ours_early_close")
