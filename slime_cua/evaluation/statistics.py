"""Scores with their denominators, intervals and coverage. Missing is missing: it is never a zero (I8).

Legend: a row is one attempt {"task", "family", "score"|None}; success of a row is its score in [0, 1].
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

PASS_SCORE = 1.0
"""An attempt passes with the full score."""
MIN_COVERAGE = 0.9
"""Below it no headline is published, only bounds."""


@dataclass(frozen=True)
class Attempt:
    task_id: str
    family: str
    score: float | None
    """None: no honest score (infrastructure or judge failure after retries)."""
    is_started: bool = True
    is_infeasible: bool = False
    """The task cannot be done: only giving up scores."""
    has_given_up: bool = False
    """The policy's last action said that the task cannot be done (FAIL)."""


@dataclass(frozen=True)
class Summary:
    """Success over the declared attempts.

    `headline` is sum of scores over declared attempts: infrastructure failures count in the denominator and bound the
    result from below; None if too few were started (`MIN_COVERAGE`). `over_valid` leaves them out. `lower` and `upper`
    take every missing score as 0 and as 1.
    """

    num_declared: int
    num_started: int
    num_valid: int
    headline: float | None
    over_valid: float | None
    lower: float
    upper: float

    @property
    def coverage(self) -> str:
        return f"{self.num_started}/{self.num_declared}"


def summarise(attempts: Sequence[Attempt]) -> Summary:
    """Counts and means of `attempts` (declared ones, started or not). Raises ValueError when empty."""
    if not attempts:
        raise ValueError("no attempts were declared: the task list is empty")
    scores = [a.score for a in attempts if a.score is not None]
    declared, total = len(attempts), float(sum(scores))
    started = sum(a.is_started for a in attempts)
    is_published = started >= MIN_COVERAGE * declared
    return Summary(
        num_declared=declared,
        num_started=started,
        num_valid=len(scores),
        headline=total / declared if is_published else None,
        over_valid=total / len(scores) if scores else None,
        lower=total / declared,
        upper=(total + declared - len(scores)) / declared,
    )


@dataclass(frozen=True)
class Feasibility:
    """Success on feasible and on infeasible tasks apart, over valid attempts; None without any. A policy that always gives
    up has `infeasible` = 1 and `give_up_rate` = 1."""

    feasible: float | None
    infeasible: float | None
    give_up_rate: float | None
    """Valid attempts at feasible tasks that ended in giving up."""


def feasibility(attempts: Sequence[Attempt]) -> Feasibility:
    """The two rates that one mean hides."""
    valid = [a for a in attempts if a.score is not None]

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    def scores(is_infeasible: bool) -> list[float]:
        return [a.score for a in valid if a.score is not None and a.is_infeasible == is_infeasible]

    given_up = [float(a.has_given_up) for a in valid if not a.is_infeasible]
    return Feasibility(mean(scores(False)), mean(scores(True)), mean(given_up))


def family_mean(attempts: Sequence[Attempt]) -> float | None:
    """avg@k: a task's scores over its valid attempts, then the mean over tasks of a family, then over families. So every
    family weighs the same, and every task in it, however many of its attempts count. None without valid ones."""
    return weighted(task_means(attempts), {attempt.task_id: attempt.family for attempt in attempts})


def weighted(scores: Mapping[str, float], family: Mapping[str, str]) -> float | None:
    """Mean over families of the mean over their tasks; None without any."""
    by_family: dict[str, list[float]] = defaultdict(list)
    for task, score in scores.items():
        by_family[family[task]].append(score)
    return float(np.mean([np.mean(one) for one in by_family.values()])) if by_family else None


def pass_at_k(attempts: Sequence[Attempt], k: int) -> dict[str, float]:
    """task -> 1 - C(n - c, k) / C(n, k) over its n valid attempts, of which c pass: the chance that k of them hold one that
    passes. A task with fewer than k valid attempts is absent: what the missing ones would have been is not known.

    Source: Chen et al. 2021, "Evaluating large language models trained on code", eq. 1.
    """
    passes: dict[str, list[bool]] = defaultdict(list)
    for attempt in attempts:
        if attempt.score is not None:
            passes[attempt.task_id].append(attempt.score >= PASS_SCORE)
    return {
        task: 1.0 - math.comb(len(one) - sum(one), k) / math.comb(len(one), k)
        for task, one in passes.items()
        if len(one) >= k
    }


def average_label(attempts: Sequence[Attempt]) -> str:
    """ "avg@4" where each task has four declared attempts, "avg@3-4" where that differs."""
    counts = sorted(Counter(attempt.task_id for attempt in attempts).values())
    return f"avg@{counts[0]}" if counts[0] == counts[-1] else f"avg@{counts[0]}-{counts[-1]}"


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float
    """95 % percentile interval."""

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def bootstrap_success(
    scores: Mapping[str, float], family: Mapping[str, str], *, num_replicates: int, seed: int
) -> Interval:
    """Family-weighted success with tasks resampled inside each family.

    scores: task -> mean score of its valid attempts; family: task -> family.
    """
    return paired_bootstrap(
        scores, dict.fromkeys(scores, 0.0), family, num_replicates=num_replicates, seed=seed
    )


def paired_bootstrap(
    after: Mapping[str, float],
    before: Mapping[str, float],
    family: Mapping[str, str],
    *,
    num_replicates: int,
    seed: int,
) -> Interval:
    """Interval of the family-weighted mean of after - before over tasks scored in both, resampled in pairs.

    Source: OS-Helix, paired bootstrap over tasks. Raises ValueError when no task is in both.
    """
    tasks = sorted(set(after) & set(before))
    if not tasks:
        raise ValueError("no task was scored in both arms: nothing to compare")
    by_family: dict[str, list[float]] = defaultdict(list)
    for task in tasks:
        by_family[family[task]].append(after[task] - before[task])
    rng = np.random.default_rng(seed)
    replicates = np.zeros(num_replicates)
    for name in sorted(by_family):
        diff = np.asarray(by_family[name])
        replicates += diff[rng.integers(0, len(diff), size=(num_replicates, len(diff)))].mean(axis=1)
    replicates /= len(by_family)
    low, high = np.percentile(replicates, [2.5, 97.5])
    return Interval(float(np.mean([np.mean(d) for d in by_family.values()])), float(low), float(high))


def task_means(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Mean score a task over its valid attempts; tasks without any are absent."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for attempt in attempts:
        if attempt.score is not None:
            by_task[attempt.task_id].append(attempt.score)
    return {task: float(np.mean(scores)) for task, scores in by_task.items()}
