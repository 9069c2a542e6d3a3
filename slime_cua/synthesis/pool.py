"""The RL task pool: pass rates of a policy, moderate difficulty, train and held-out sides that share nothing.

Source: OS-Helix B.4: the pool is built by rolling out the trained model over candidates and keeping those of moderate
difficulty; near-duplicate instructions are found by similarity of their text.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime_cua.config.pool import PoolConfig
from slime_cua.core.errors import DataError
from slime_cua.core.types import Episode, Task
from slime_cua.synthesis.near_duplicates import UnionFind, clusters

Verdict = Literal["kept", "too easy", "too hard", "not measured", "near-duplicate"]
METADATA_KEY = "pool"
"""Where a pool file's tasks have what was measured of them (in `metadata`, which no policy sees)."""
HISTOGRAM_BINS = 10
BAR_CHARS = 40


@dataclass(frozen=True)
class Measured:
    """A candidate with what the policy's attempts at it gave."""

    task: Task
    rewards: tuple[float, ...]
    """Scores of valid attempts."""
    num_invalid: int
    cluster: str
    """Id of the first candidate that it is a near-duplicate of, in the candidates' order; its own id if none is before it."""
    pass_rate: float | None
    """Share of valid attempts that passed; None when there are too few."""
    verdict: Verdict


def measure(tasks: Sequence[Task], episodes: Iterable[Episode], config: PoolConfig) -> list[Measured]:
    """The candidates in their order with pass rates and verdicts.

    episodes: all attempts, in any order. Raises DataError for an episode of a task that is no candidate.
    """
    rewards: dict[str, list[float]] = {task.id: [] for task in tasks}
    invalid: Counter[str] = Counter()
    for episode in episodes:
        if episode.task_id not in rewards:
            raise DataError(
                f"episode {episode.episode_id} is of task {episode.task_id}, which is no candidate"
            )
        if episode.is_valid and episode.reward is not None:
            rewards[episode.task_id].append(episode.reward)
        else:
            invalid[episode.task_id] += 1
    first_of = clusters([task.instruction for task in tasks], config.near_duplicate_threshold)
    found = []
    for task, first in zip(tasks, first_of, strict=True):
        own = tuple(rewards[task.id])
        rate = pass_rate(own, config)
        found.append(Measured(task, own, invalid[task.id], tasks[first].id, rate, _difficulty(rate, config)))
    return _thinned(found, config.max_per_cluster)


def pass_rate(rewards: Sequence[float], config: PoolConfig) -> float | None:
    """Share of scores above the threshold; None with fewer than min_valid_attempts."""
    if len(rewards) < config.min_valid_attempts:
        return None
    return sum(reward > config.success_threshold for reward in rewards) / len(rewards)


def _difficulty(rate: float | None, config: PoolConfig) -> Verdict:
    if rate is None:
        return "not measured"
    if rate < config.min_pass_rate:
        return "too hard"
    return "too easy" if rate > config.max_pass_rate else "kept"


def _thinned(found: Sequence[Measured], most: int) -> list[Measured]:
    """At most `most` kept tasks a cluster (0: all), those nearest to a pass rate of a half."""
    kept: defaultdict[str, list[int]] = defaultdict(list)
    for index, one in enumerate(found):
        if one.verdict == "kept":
            kept[one.cluster].append(index)
    surplus: set[int] = set()
    if most:
        for members in kept.values():
            members.sort(key=lambda index: (abs((found[index].pass_rate or 0.0) - 0.5), index))
            surplus.update(members[most:])
    return [
        Measured(one.task, one.rewards, one.num_invalid, one.cluster, one.pass_rate, "near-duplicate")
        if index in surplus
        else one
        for index, one in enumerate(found)
    ]


def app_of(task: Task) -> str:
    """The apps that a task is about: related apps, or its family."""
    return "+".join(sorted(task.related_apps)) or task.family or "(no app)"


def split(kept: Sequence[Measured], config: PoolConfig) -> tuple[list[Measured], list[Measured]]:
    """(train, held out): what `split_by` names is on one side only. Depends on the tasks, the config and its seed alone.

    By task or cluster each app gives up to its share of tasks; by app, apps are taken whole (apps that share a task or a
    cluster go together), nearest to the share. Raises DataError when there are not two parts to put on two sides.
    """
    if config.heldout_share == 0:
        return list(kept), []
    units = _units(kept, config.split_by)
    if len(units) < 2:
        raise DataError(
            f"the {len(kept)} kept task(s) cannot be split by {config.split_by}: they are all one {config.split_by}; "
            "give more candidates, or set pool.split_by or pool.near_duplicate_threshold, or pool.heldout_share = 0"
        )
    random.Random(config.seed).shuffle(units)
    heldout = _taken(kept, units, config)
    chosen = {index for unit in heldout for index in unit}
    sides: tuple[list[Measured], list[Measured]] = ([], [])
    for index, one in enumerate(kept):
        sides[index in chosen].append(one)
    return sides


def _units(kept: Sequence[Measured], by: str) -> list[list[int]]:
    """Indices of tasks that must stay together, in a fixed order."""
    joined = UnionFind(len(kept))
    first_with: dict[tuple[str, str], int] = {}
    for index, one in enumerate(kept):
        marks = [] if by == "task" else [("cluster", one.cluster)]
        if by == "app":
            marks += [("app", app) for app in (one.task.related_apps or (one.task.family,))]
        for mark in marks:
            joined.join(index, first_with.setdefault(mark, index))
    members: defaultdict[int, list[int]] = defaultdict(list)
    for index in range(len(kept)):
        members[joined.find(index)].append(index)
    return [members[name] for name in sorted(members)]


def _taken(kept: Sequence[Measured], units: Sequence[list[int]], config: PoolConfig) -> list[list[int]]:
    """Units for the held-out side, in the given order; at least one, never all."""
    by_app = config.split_by == "app"
    stratum = {id(unit): "" if by_app else app_of(kept[unit[0]].task) for unit in units}
    size: Counter[str] = Counter()
    for unit in units:
        size[stratum[id(unit)]] += len(unit)
    taken: list[list[int]] = []
    num_taken: Counter[str] = Counter()
    for unit in units:
        name = stratum[id(unit)]
        room = config.heldout_share * size[name] - num_taken[name]
        if len(unit) - room <= room and len(taken) < len(units) - 1:
            taken.append(unit)
            num_taken[name] += len(unit)
    return taken or [min(units, key=len)]


def histogram(found: Sequence[Measured]) -> list[tuple[str, int]]:
    """(range of pass rates, number of candidates) in HISTOGRAM_BINS equal ranges, exact 0 and 1 apart."""
    counts: Counter[str] = Counter()
    names = ["0", *(_bin_name(n) for n in range(HISTOGRAM_BINS)), "1", "not measured"]
    for one in found:
        counts[_bin_of(one.pass_rate)] += 1
    return [(name, counts[name]) for name in names]


def _bin_of(rate: float | None) -> str:
    if rate is None:
        return "not measured"
    if rate in (0.0, 1.0):
        return f"{rate:.0f}"
    return _bin_name(min(HISTOGRAM_BINS - 1, int(rate * HISTOGRAM_BINS)))


def _bin_name(number: int) -> str:
    return f"{number / HISTOGRAM_BINS:.1f}-{(number + 1) / HISTOGRAM_BINS:.1f}"


def report(found: Sequence[Measured], train: Sequence[Measured], heldout: Sequence[Measured]) -> str:
    """What was measured and what became of it, for a terminal."""
    bars = histogram(found)
    most = max(count for _, count in bars) or 1
    lines = ["pass rate     candidates"]
    lines += [
        f"{name:<13} {count:>6}  {'#' * round(BAR_CHARS * count / most)}".rstrip() for name, count in bars
    ]
    verdicts = Counter(one.verdict for one in found)
    lines.append("")
    lines.append("; ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    lines.append(f"{len(train)} tasks to train, {len(heldout)} held out")
    apps = Counter(app_of(one.task) for one in train), Counter(app_of(one.task) for one in heldout)
    lines += [f"  {app}: {apps[0][app]} + {apps[1][app]}" for app in sorted(apps[0].keys() | apps[1].keys())]
    return "\n".join(lines)


def task_lines(
    side: Sequence[Measured], split: Literal["train", "heldout"], provenance: dict[str, Any]
) -> bytes:
    """The side as a JSONL task file, which tasks.train and tasks.heldout take: each task with its pass rate and where it is from."""
    lines = []
    for one in side:
        own = {
            "pass_rate": one.pass_rate,
            "mean_score": sum(one.rewards) / len(one.rewards),
            "num_valid": len(one.rewards),
            "num_invalid": one.num_invalid,
            "cluster": one.cluster,
            **provenance,
        }
        plain = one.task.model_dump(mode="json", exclude={"is_infeasible"})
        plain |= {"split": split, "metadata": {**one.task.metadata, METADATA_KEY: own}}
        lines.append(json.dumps(plain, ensure_ascii=False))
    return "".join(f"{line}\n" for line in lines).encode()
