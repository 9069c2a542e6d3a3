"""A line for a run whose steps wait for episodes that outlast them: which key helps, and how much to set."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from slime_cua.config.rollout import RolloutConfig
from slime_cua.core.types import EpisodeGroup

NUM_STEPS = 5
"""The last so many steps are looked at."""
ROUNDS = 8
"""Recommended rollout.scheduler.num_ahead_groups, in steps' groups: docs/pipeline.md has what it gave."""
MIN_WAIT_SHARE = 0.2


class AheadHint:
    """Watches what groups and steps took; speaks at most once a start."""

    def __init__(self, config: RolloutConfig, num_tasks: int) -> None:
        """num_tasks: of the training pool. One that is smaller than what would be held back gains nothing measured."""
        self._wanted = ROUNDS * config.groups_per_step
        self._is_open = config.scheduler.num_ahead_groups == 0 and num_tasks >= self._wanted
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=NUM_STEPS)

    def note(self, groups: Sequence[EpisodeGroup], values: Mapping[str, float]) -> str:
        """After a step over `groups` with these metrics: the line, or "" while there is nothing to say."""
        if not self._is_open:
            return ""
        longest_s = [
            max((e.ended_s - e.started_s for e in g.episodes if e.is_valid), default=0.0) for g in groups
        ]
        work_s = values["time/train_s"] + values.get("time/publish_s", 0.0)
        self._steps.append((sum(longest_s) / max(1, len(groups)), work_s, values["time/wait_s"]))
        group_s, work_s, wait_s = (
            sum(column) / len(self._steps) for column in zip(*self._steps, strict=True)
        )
        waits = wait_s / max(1e-9, wait_s + work_s)
        if len(self._steps) < NUM_STEPS or group_s <= work_s or waits < MIN_WAIT_SHARE:
            return ""
        self._is_open = False
        return (
            f"steps wait for long episodes: in the last {NUM_STEPS} steps a group took {group_s:.0f} s, train and publish "
            f"{work_s:.0f} s, and the trainer waited {waits:.0%} of the time. rollout.scheduler.num_ahead_groups is 0; "
            f"{self._wanted} ({ROUNDS} x groups_per_step) lets groups of like duration run together (docs/pipeline.md). "
            "A run keeps its value: set it for a new run_dir"
        )
