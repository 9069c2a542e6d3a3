"""Samplers that follow the policy's success: near the frontier of what it can do, or inside a band of difficulty."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from slime_cua.algo.samplers import TaskSampler, UniformSampler, WeightedClassSampler, normalised
from slime_cua.config.algo import FrontierConfig
from slime_cua.core.errors import ConfigError

INITIAL_ESTIMATE = 0.5


class _EstimatingSampler(TaskSampler):
    """Keeps an exponential average of success for each task; before any valid outcome its family's average, or 0.5.

    family_of: {task: family}; tasks without one start at 0.5.
    """

    def __init__(
        self,
        task_ids: Iterable[str],
        *,
        retention: float,
        seed: int,
        family_of: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(task_ids, seed=seed)
        if not 0 <= retention < 1:
            raise ValueError(
                f"retention {retention} must be in [0, 1): the share of the old estimate that stays"
            )
        self.retention = retention
        self._family_of = dict(family_of or {})
        self._estimate: dict[str, float] = {}
        self._family_estimate: dict[str, float] = {}

    def estimates(self) -> dict[str, float]:
        """Success estimate of each task."""
        return {task: self._estimate_of(task) for task in self._tasks}

    def _estimate_of(self, task_id: str) -> float:
        family = self._family_estimate.get(self._family_of.get(task_id, ""), INITIAL_ESTIMATE)
        return self._estimate.get(task_id, family)

    def _learn(self, task_id: str, outcomes: list[float]) -> None:
        """p <- retention p + (1 - retention) mean(outcomes), for the task and for its family."""
        mean = math.fsum(outcomes) / len(outcomes)
        self._estimate[task_id] = self._moved(self._estimate_of(task_id), mean)
        family = self._family_of.get(task_id)
        if family is not None:
            old = self._family_estimate.get(family, INITIAL_ESTIMATE)
            self._family_estimate[family] = self._moved(old, mean)

    def _moved(self, old: float, mean: float) -> float:
        return self.retention * old + (1.0 - self.retention) * mean

    def _forget(self, task_id: str) -> None:
        self._estimate.pop(task_id, None)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "estimate": dict(self._estimate),
            "family_estimate": dict(self._family_estimate),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._estimate = dict(state["estimate"])
        self._family_estimate = dict(state["family_estimate"])


class FrontierSampler(_EstimatingSampler):
    """Prefers tasks that the policy solves about `target` of the time.

        p     <- retention p + (1 - retention) mean(valid successes of the group)
                 before any: the same average over all groups of the task's family, where family_of names one; else 0.5
        g(p)  =  max(min_weight, exp(-(p - target)^2 / (2 sigma^2)))
        w     =  (1 - uniform_mix) g / sum g + uniform_mix / N

    reading: "retention" (given, above) keeps `retention` of the old; "step" reads it as the weight of the new one:
        p <- (1 - retention) p + retention mean. The paper's symbol allows both.
    No task starves: w >= max_expected_gap() ** -1 at every single draw, whatever its estimate.
    Source: OS-Helix, section 3.4 (difficulty-aware sampling); floor, mixture and family start are ours: with more tasks
    than draws nearly every task is new, and without the family's average the sampler would stay uniform.
    """

    def __init__(
        self,
        task_ids: Iterable[str],
        *,
        target: float = 0.5,
        sigma: float = 0.25,
        retention: float = 0.9,
        min_weight: float = 0.05,
        uniform_mix: float = 0.2,
        seed: int,
        reading: Literal["retention", "step"] = "retention",
        family_of: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            task_ids,
            retention=retention if reading == "retention" else 1 - retention,
            seed=seed,
            family_of=family_of,
        )
        if not (sigma > 0 and 0 <= target <= 1 and 0 <= min_weight <= 1 and 0 <= uniform_mix <= 1):
            raise ValueError(
                f"sigma {sigma} must be > 0; target {target}, min_weight {min_weight} and uniform_mix {uniform_mix} in [0, 1]"
            )
        self.target, self.sigma = target, sigma
        self.min_weight, self.uniform_mix = min_weight, uniform_mix

    def frontier_weight(self, estimate: float) -> float:
        """g(p): 1 at the target, never below min_weight."""
        return max(self.min_weight, math.exp(-((estimate - self.target) ** 2) / (2 * self.sigma**2)))

    def weights(self) -> dict[str, float]:
        if not self._tasks:
            return {}
        shares = normalised({task: self.frontier_weight(p) for task, p in self.estimates().items()})
        uniform = self.uniform_mix / len(shares)
        return {task: (1 - self.uniform_mix) * share + uniform for task, share in shares.items()}

    def max_expected_gap(self) -> float:
        """Upper bound on the expected number of single draws between two of the same idle task.

            w >= (1 - uniform_mix) min_weight / (min_weight + N - 1) + uniform_mix / N = 1 / gap
        Draws without repeats inside a collection only shorten it (the others' weight leaves). Infinite if both are 0.
        """
        count = len(self._tasks)
        floor = self.min_weight / (self.min_weight + count - 1) if count > 1 else 1.0
        least = (1 - self.uniform_mix) * floor + self.uniform_mix / max(count, 1)
        return 1.0 / least if least > 0 else math.inf


class DifficultyBandSampler(_EstimatingSampler):
    """Tasks whose estimate lies in [low, high] weigh 1, the others outside_weight. Unseen tasks count as inside."""

    def __init__(
        self,
        task_ids: Iterable[str],
        *,
        low: float = 0.2,
        high: float = 0.8,
        outside_weight: float = 0.1,
        retention: float = 0.9,
        seed: int,
    ) -> None:
        super().__init__(task_ids, retention=retention, seed=seed)
        if not 0 <= low <= high <= 1 or not 0 <= outside_weight <= 1:
            raise ValueError(
                f"need 0 <= low {low} <= high {high} <= 1 and outside_weight {outside_weight} in [0, 1]"
            )
        self.low, self.high, self.outside_weight = low, high, outside_weight

    def weights(self) -> dict[str, float]:
        if not self._tasks:
            return {}
        inside = {
            task: task not in self._estimate or self.low <= self._estimate[task] <= self.high
            for task in self._tasks
        }
        return normalised({task: 1.0 if is_in else self.outside_weight for task, is_in in inside.items()})


def make_sampler(
    task_ids: Iterable[str],
    config: FrontierConfig,
    *,
    seed: int,
    class_of: Mapping[str, str] | None = None,
    family_of: Mapping[str, str] | None = None,
) -> TaskSampler:
    """The sampler that config.name says, with its success_threshold.

    class_of: {task: class}, needed by weighted_classes. family_of: {task: family}, used by frontier with start = family.
    """
    sampler = _by_name(task_ids, config, seed, class_of, family_of)
    sampler.success_threshold = config.success_threshold
    return sampler


def _by_name(
    task_ids: Iterable[str],
    config: FrontierConfig,
    seed: int,
    class_of: Mapping[str, str] | None,
    family_of: Mapping[str, str] | None,
) -> TaskSampler:
    if config.name == "uniform":
        return UniformSampler(task_ids, seed=seed)
    if config.name == "difficulty_bands":
        return DifficultyBandSampler(
            task_ids, low=config.band[0], high=config.band[1], retention=config.retention, seed=seed
        )
    if config.name == "weighted_classes":
        if not class_of:
            raise ConfigError(
                "sampler.name = weighted_classes needs a class for each task: metadata.class of the tasks"
            )
        return WeightedClassSampler(task_ids, class_of=class_of, weight_of=config.class_weights, seed=seed)
    return FrontierSampler(
        task_ids,
        target=config.target,
        sigma=config.sigma,
        retention=config.retention,
        min_weight=config.min_weight,
        uniform_mix=config.uniform_mix,
        seed=seed,
        family_of=family_of if config.start == "family" else None,
    )
