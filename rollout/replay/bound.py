"""The least time that a trainer waits, whatever the schedule, when no group is discarded and no token is older than L.

Step k trains B groups. S_k is its start, E_k its end (weights published: from then on tokens are of version k + 1),
s_k = E_k - S_k; a_k = S_k - E_{k-1} is what the trainer waits before it. Group i takes d_i from its first token to its end.

    first token of version x  =>  it came after E_{x-1}, and the group is trained in some step y with x <= y <= x + L
    trained in step y         =>  S_y >= E_{x-1} + d_i                                                              (1)

Bounds are over schedules that train the same groups as the one they are compared with, each once: a schedule that put off
the long ones to the end of the replay would have less to wait for.

**Any order: schedules that know all durations beforehand and hold any group back as long as they like.** If D_k is the
longest group of step k, (1) with x >= k - L gives

    a_{k-L} + ... + a_k >= D_k - (s_{k-L} + ... + s_{k-1}).

Add this over the m steps with the longest D_k. Each a_k counts at most L + 1 times, each s_k at most L times; the j-th
longest D_k is at least the (1 + (j-1) B)-th longest group, and m steps take at most what the m B groups with most tokens
take. So for every m

    (L + 1) sum a >= sum_{j<=m} d_(1+(j-1)B) - L * (the longest m steps),

and the bound is the greatest of these. What can be reached: first the B shortest (nothing trains before them), then by
falling duration, B start after each step, trained in that order (a_k = what (1) leaves). With desktops enough for (L + 1) B
groups that is a schedule; for L = 1 it waits within a point of the bound on the traces of docs/pipeline.md.

**Start order given.** Least for schedules that start the groups in the order in which the replayed one did, but may choose
with all knowledge how many to start when and which to train when. For L = 1 the state before step v is how many groups are
left of those that started under version v - 1 (all must be in step v) and how long the last of them still takes. n more
start (as early as (1) allows, at E_{v-1}); the shortest fill the step, the rest must be in the next. Taking the shortest is
right by exchange: all n started together, and what stays has a step more. So a dynamic program over (groups left, waited so
far, time still needed) finds the least sum of a_k; of states with as many groups left, those worse in both other parts are
left out. It is exact for equal step times and machines without limit. For L >= 2, L steps are taken as one large step of
L * B groups: floor((x + L) / L) = floor(x / L) + 1, so in large steps the lag is at most 1; a group must have ended when the
last of the L steps starts. That forgets constraints: a bound, no longer exact. For L = 0 each step waits for the longest of
its groups. Where step times differ, each step is as long as the groups within reach could make it, so the bound stays below.

**Machines.** The desktops' time of the groups over the number of desktops, and their tokens over the engines' best rate.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rollout.replay.scenario import ScenarioConfig
from rollout.replay.simulate import group_tokens, nominal_s, step_seconds, valid_attempts
from rollout.replay.trace import GroupTrace


@dataclass(frozen=True)
class IdleBound:
    """Least seconds of waiting over a run, for several reasons, and the time in steps (publishing included)."""

    start_order_s: float
    """For schedules that start the groups in the same order."""
    any_order_s: float
    """For every schedule."""
    reachable_s: float
    """Waited by a schedule that knows all durations and starts groups in the best order found: not below any_order_s."""
    machines_s: float
    train_s: float

    @property
    def share_start_order(self) -> float:
        """Least share of the time in which the trainer waits, for schedules that start groups in the same order."""
        return self._share(max(self.start_order_s, self.any_order_s, self.machines_s))

    @property
    def share_any_order(self) -> float:
        """The same for every schedule."""
        return self._share(max(self.any_order_s, self.machines_s))

    @property
    def share_reachable(self) -> float:
        """Share that the schedule which knows everything waits; machines included as a bound only."""
        return self._share(max(self.reachable_s, self.machines_s))

    def _share(self, waited_s: float) -> float:
        return waited_s / (waited_s + self.train_s)


def least_waiting_in_order(
    spans_s: Sequence[float], per_step: int, step_s: Sequence[float], room_s: Sequence[float] | None = None
) -> float:
    """Least sum of waiting over len(step_s) steps of `per_step` groups, at most one version of lag, starts in order.

    spans_s: d_i in draw order, at least per_step * len(step_s) of them. step_s: the time of each step. room_s: how long
    after a step's start its groups may still run (0 for plain steps).
    """
    fronts: dict[int, list[tuple[float, float]]] = {0: [(0.0, 0.0)]}
    for step, seconds in enumerate(step_s):
        room = room_s[step] if room_s else 0.0
        following: dict[int, list[tuple[float, float]]] = {}
        for left, front in fronts.items():
            start, filling = step * per_step + left, per_step - left
            most = min(filling + per_step, len(spans_s) - start)
            new = sorted(spans_s[start : start + filling])
            for started in range(filling, most + 1):
                if started > filling:
                    insort(new, spans_s[start + started - 1])
                joins = new[filling - 1] if filling else 0.0
                rest = new[-1] if started > filling else 0.0
                states = following.setdefault(started - filling, [])
                for waited, needed in front:
                    wait = max(0.0, max(needed, joins) - room)
                    states.append((waited + wait, max(0.0, rest - wait - seconds)))
        fronts = {left: _undominated(states) for left, states in following.items()}
    return min(waited for front in fronts.values() for waited, _ in front)


def _undominated(states: list[tuple[float, float]]) -> list[tuple[float, float]]:
    kept: list[tuple[float, float]] = []
    for waited, needed in sorted(states):
        if not kept or needed < kept[-1][1]:
            kept.append((waited, needed))
    return kept


def least_waiting_any_order(
    spans_s: Sequence[float], per_step: int, max_lag: int, longest_steps_s: Sequence[float]
) -> float:
    """Least sum of waiting over steps that train all of `spans_s`, `per_step` each, in whichever order.

    longest_steps_s: [m - 1] is the most that m steps can take together.
    """
    longest_first = sorted(spans_s, reverse=True)
    waited, least = 0.0, 0.0
    for m, duration in enumerate(longest_first[::per_step]):
        waited += duration
        least = max(least, waited - max_lag * longest_steps_s[m])
    return least / (max_lag + 1)


def shortest_then_falling(spans_s: Sequence[float], per_step: int) -> list[int]:
    """Indices of `spans_s`: the `per_step` shortest, then the rest by falling duration."""
    order = sorted(range(len(spans_s)), key=lambda index: -spans_s[index])
    return order[-per_step:] + order[:-per_step]


def waiting_of_order(
    spans_s: Sequence[float], steps_s: Sequence[float], per_step: int, max_lag: int
) -> float:
    """Waited by the schedule that starts and trains groups in this order, `per_step` after each step."""
    ends = [0.0]
    waited = 0.0
    for k, step_s in enumerate(steps_s):
        longest = max(spans_s[k * per_step : (k + 1) * per_step])
        start = max(ends[k], ends[max(0, k - max_lag)] + longest)
        waited += start - ends[k]
        ends.append(start + step_s)
    return waited


def idle_bound(
    groups: Sequence[GroupTrace],
    trained: Sequence[GroupTrace],
    scenario: ScenarioConfig,
    max_lag: int,
    mean: float,
) -> IdleBound:
    """The bounds for a replay that started `groups` in this order and trained `trained`; mean: tokens of a mean step."""
    per_step, site = scenario.groups_per_step, scenario.site
    spans = {id(group): nominal_s(group, scenario) for group in groups}
    tokens = {id(group): group_tokens(group, scenario.episodes_per_group) for group in groups}

    def step_s(within: Sequence[GroupTrace]) -> float:
        return step_seconds(site, sum(tokens[id(group)] for group in within), mean) + site.publish_s

    def steps_s(ordered: Sequence[GroupTrace]) -> list[float]:
        return [step_s(ordered[k : k + per_step]) for k in range(0, len(ordered), per_step)]

    def longest_step_s(k: int) -> float:
        within = groups[max(0, k - max_lag) * per_step : (k + max_lag + 1) * per_step]
        return step_s(heapq.nlargest(per_step, within, key=lambda group: tokens[id(group)]))

    num_steps = len(trained) // per_step
    trained_spans = [spans[id(group)] for group in trained]
    best = shortest_then_falling(trained_spans, per_step)
    most_first = sorted(trained, key=lambda group: -tokens[id(group)])
    train_s = math.fsum(steps_s(trained))
    return IdleBound(
        start_order_s=_in_order(
            [spans[id(group)] for group in groups[: (num_steps + max_lag) * per_step]],
            [longest_step_s(k) for k in range(num_steps)],
            per_step,
            max_lag,
        ),
        any_order_s=least_waiting_any_order(
            trained_spans, per_step, max_lag, list(accumulate(steps_s(most_first)))
        ),
        reachable_s=waiting_of_order(
            [trained_spans[n] for n in best], steps_s([trained[n] for n in best]), per_step, max_lag
        ),
        machines_s=max(0.0, _machines_s(trained, scenario) - train_s),
        train_s=train_s,
    )


def _in_order(spans: Sequence[float], steps: Sequence[float], per_step: int, max_lag: int) -> float:
    if max_lag == 0:
        batches = [spans[k * per_step : (k + 1) * per_step] for k in range(len(steps))]
        return math.fsum(max(batch) for batch in batches)
    large = [steps[k : k + max_lag] for k in range(0, len(steps) - max_lag + 1, max_lag)]
    return least_waiting_in_order(
        spans,
        max_lag * per_step,
        [math.fsum(part) for part in large],
        [math.fsum(part) - min(part) for part in large],
    )


def _machines_s(groups: Sequence[GroupTrace], scenario: ScenarioConfig) -> float:
    site = scenario.site
    desks, tokens = [], []
    for group in groups:
        attempts = valid_attempts(group, scenario)
        read_s = 1 / site.prefill_tokens_per_s
        desks.append(sum(e.boot_s + e.setup_s + e.span_s(site.decode_s, read_s) for e in attempts))
        tokens.append(sum(e.response_tokens for e in attempts))
    best_rate = site.max_batch / (site.decode_s + (site.max_batch - 1) * site.decode_s_per_request)
    return max(
        sum(desks) / site.num_desktops,
        sum(tokens) / (site.num_engines * best_rate),
    )
