"""What every task sampler shares: draws without repeats, draws in flight, tasks that come and go, exact state.

A sampler says how much each task weighs; this file turns weights into draws. Plain Python, no torch.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime_cua.core.errors import ConfigError

Outcomes = Mapping[str, Sequence[float | bool | None]]


class TaskSampler(ABC):
    """Draws tasks for collections. Subclasses give weights() and learn in _learn().

    A collection is one call of sample(): no task twice in it. Tasks drawn and not yet updated are in flight; they are drawn
    again only when too few others are left. All of it is in state_dict(), as JSON values, so that a resumed run draws the
    same tasks.
    """

    success_threshold: float | None = None
    """update() takes the score itself; with a threshold, 1 for a score above it and 0 otherwise."""

    def __init__(self, task_ids: Iterable[str], *, seed: int) -> None:
        self._tasks: dict[str, None] = dict.fromkeys(task_ids)
        self._random = random.Random(seed)
        self._in_flight: Counter[str] = Counter()
        self._num_draws: Counter[str] = Counter()
        self._num_collections = 0

    @abstractmethod
    def weights(self) -> dict[str, float]:
        """Probability of each task at the next single draw; sums to 1."""

    @abstractmethod
    def _learn(self, task_id: str, outcomes: list[float]) -> None:
        """Take the valid outcomes of one group of `task_id` in."""

    @property
    def task_ids(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    @property
    def in_flight(self) -> dict[str, int]:
        """Draws without an update yet, by task."""
        return {task: count for task, count in self._in_flight.items() if count}

    @property
    def num_draws(self) -> dict[str, int]:
        """Draws so far, by task."""
        return {task: self._num_draws[task] for task in self._tasks}

    def sample(self, n: int) -> list[str]:
        """`n` different tasks, one after the other by weight among those not drawn yet.

        Raises ValueError if n is below 1 or above the number of tasks.
        """
        if not 1 <= n <= len(self._tasks):
            raise ValueError(
                f"cannot draw {n} different tasks from {len(self._tasks)}: lower groups_per_step or add tasks"
            )
        weights = self.weights()
        idle = [task for task in self._tasks if not self._in_flight[task]]
        busy = [task for task in self._tasks if self._in_flight[task]]
        drawn = self._draw(idle, weights, min(n, len(idle)))
        drawn += self._draw(busy, weights, n - len(drawn))
        for task in drawn:
            self._in_flight[task] += 1
            self._num_draws[task] += 1
        self._num_collections += 1
        return drawn

    def update(self, outcomes: Outcomes) -> None:
        """Groups that ended: {task: [score of each episode]}, a bool or a number in [0, 1]; see success_threshold.

        None and NaN are episodes without a valid outcome: they count for nothing. A list without any valid outcome only
        ends the draw. A task that was removed meanwhile is passed over. Raises ValueError for a score outside [0, 1], before any group is taken in.
        """
        groups: dict[str, list[float]] = {}
        for task, values in outcomes.items():
            valid = [float(value) for value in values if value is not None and not math.isnan(value)]
            wrong = [value for value in valid if not 0.0 <= value <= 1.0]
            if wrong:
                raise ValueError(
                    f"task {task}: success {wrong[0]} must be in [0, 1], or None for an invalid episode"
                )
            groups[task] = valid
        for task, valid in groups.items():
            self.release(task)
            if task in self._tasks and valid:
                self._learn(task, successes(valid, self.success_threshold))

    def release(self, task_id: str) -> None:
        """A draw of `task_id` ended without an outcome (cancelled, or given up)."""
        if self._in_flight[task_id] > 1:
            self._in_flight[task_id] -= 1
        else:
            self._in_flight.pop(task_id, None)

    def add_tasks(self, task_ids: Iterable[str]) -> None:
        """New tasks, from the next draw on; known ones stay as they are."""
        for task in task_ids:
            self._tasks.setdefault(task)

    def remove_tasks(self, task_ids: Iterable[str]) -> None:
        """No draws of these any more; what was learnt about them is forgotten. Unknown ids are passed over.

        Their draws stay in flight until they end, also where the task is added again meanwhile.
        """
        for task in task_ids:
            self._tasks.pop(task, None)
            self._num_draws.pop(task, None)
            self._forget(task)

    def _forget(self, task_id: str) -> None:
        """Drop what _learn kept; samplers that learn extend it."""
        return

    def _draw(self, tasks: list[str], weights: Mapping[str, float], count: int) -> list[str]:
        drawn: list[str] = []
        left = list(tasks)
        for _ in range(count):
            sums = list(itertools.accumulate(weights[task] for task in left))
            if sums[-1] > 0.0:
                spot = bisect.bisect_right(sums, self._random.random() * sums[-1])
                spot = min(spot, len(left) - 1)
            else:
                spot = self._random.randrange(len(left))
            drawn.append(left.pop(spot))
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON values; floats survive JSON bit for bit."""
        version, internal, gauss = self._random.getstate()
        return {
            "kind": type(self).__name__,
            "tasks": list(self._tasks),
            "random": [version, list(internal), gauss],
            "in_flight": dict(self._in_flight),
            "num_draws": dict(self._num_draws),
            "num_collections": self._num_collections,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what state_dict() described, tasks included. Raises ConfigError if it is another sampler's."""
        if state.get("kind") != type(self).__name__:
            raise ConfigError(
                f"the saved sampler is a {state.get('kind')}, this one a {type(self).__name__}: set sampler.name as saved"
            )
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), gauss))
        self._tasks = dict.fromkeys(state["tasks"])
        self._in_flight = Counter(state["in_flight"])
        self._num_draws = Counter(state["num_draws"])
        self._num_collections = state["num_collections"]


def successes(scores: Iterable[float], threshold: float | None) -> list[float]:
    """The scores themselves, or 1.0 / 0.0 by score > threshold."""
    return list(scores) if threshold is None else [float(score > threshold) for score in scores]


def normalised(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights over their sum; equal ones if the sum is 0."""
    total = math.fsum(weights.values())
    if total <= 0.0:
        return {task: 1.0 / len(weights) for task in weights}
    return {task: weight / total for task, weight in weights.items()}


class UniformSampler(TaskSampler):
    """Every task the same."""

    def weights(self) -> dict[str, float]:
        return normalised(dict.fromkeys(self._tasks, 1.0))

    def _learn(self, task_id: str, outcomes: list[float]) -> None:
        pass


class WeightedClassSampler(TaskSampler):
    """Each task weighs what its class weighs, e.g. MMSkill-RL's step labels.

    class_of: {task: class}; weight_of: {class: weight >= 0}. Tasks added later need set_classes first.
    Example: weight_of={"skill_rescue": 3.5, "fallback": 1.75, "direct": 1.0, "uncovered": 0.5}
    """

    def __init__(
        self,
        task_ids: Iterable[str],
        *,
        class_of: Mapping[str, str],
        weight_of: Mapping[str, float],
        seed: int,
    ) -> None:
        super().__init__(task_ids, seed=seed)
        self._class_of: dict[str, str] = {}
        self._weight_of = dict(weight_of)
        if any(not weight >= 0 for weight in self._weight_of.values()):
            raise ValueError(f"class weights must be >= 0: {self._weight_of}")
        self.set_classes(class_of)
        missing = [task for task in self._tasks if task not in self._class_of]
        if missing:
            raise ValueError(f"no class for task {missing[0]} (and {len(missing) - 1} more)")

    def set_classes(self, class_of: Mapping[str, str]) -> None:
        """Add or change classes. Raises ValueError for a class without a weight."""
        for task, name in class_of.items():
            if name not in self._weight_of:
                raise ValueError(
                    f"task {task}: class {name!r} has no weight; known: {', '.join(self._weight_of)}"
                )
            self._class_of[task] = name

    def weights(self) -> dict[str, float]:
        return normalised({task: self._weight_of[self._class_of[task]] for task in self._tasks})

    def add_tasks(self, task_ids: Iterable[str]) -> None:
        """As TaskSampler; raises ValueError for a task without a class."""
        tasks = list(task_ids)
        missing = [task for task in tasks if task not in self._class_of]
        if missing:
            raise ValueError(f"task {missing[0]} has no class: call set_classes first")
        super().add_tasks(tasks)

    def _learn(self, task_id: str, outcomes: list[float]) -> None:
        pass

    def _forget(self, task_id: str) -> None:
        self._class_of.pop(task_id, None)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"class_of": dict(self._class_of), "weight_of": dict(self._weight_of)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._class_of, self._weight_of = dict(state["class_of"]), dict(state["weight_of"])
