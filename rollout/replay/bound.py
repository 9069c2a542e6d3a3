"""The least time that a trainer waits, whatever the schedule, when no group is discarded and no token is older than L.

Step k trains B groups. S_k is its start, E_k its end (weights published: from then on tokens are of version k + 1),
s_k = E_k - S_k; a_k = S_k - E_{k-1} is what the trainer waits before it. Group i takes d_i from its first token to its end.

    first token of version x  =>  it came after E_{x-1}, and the group is trained in some step y with x <= y <= x + L
    trained in step y         =>  S_y >= E_{x-1} + d_i                                                              (1)

**Schedules that start groups in the order in which they were drawn** (no task overtakes another by whole versions).
For L = 1 the state before step v is how many groups are left of those that started under version v - 1 (all must be in
step v) and how long the last of them still takes. n more start (as early as (1) allows, at E_{v-1}); the shortest fill
the step, the rest must be in the next. Taking the shortest is right by exchange: all n started together, and what stays
has a step more. So a dynamic program over (groups left, waited so far, time still needed) finds the least sum of a_k; of
states with as many groups left, those worse in both other parts are left out. It is exact for equal step times and
machines without limit. For L >= 2, L steps are taken as one large step of L * B groups: floor((x + L) / L) =
floor(x / L) + 1, so in large steps the lag is at most 1; a group must have ended when the last of the L steps starts. That
forgets constraints: a bound, no longer exact. For L = 0 each step waits for the longest of its groups.

**Any order.** Step k trains groups of which the longest takes D_k; by (1) with x >= k - L,

    a_{k-L} + ... + a_k >= D_k - (s_{k-L} + ... + s_{k-1}).

Adding this over all k counts each a_k at most L + 1 times. The sum of max(0, D_k - L s) is least when groups are batched
by length. So even a schedule that knows all durations and may hold any group back waits at least 1 / (L + 1) of that.

**Machines.** The desktops' time of the groups over the number of desktops, and their tokens over the engines' best rate.

Where step times differ, s is the longest step that the groups within reach could make: longer steps leave less to wait for,
so the bound stays below. K steps can have started at most the first (K + L) * B draws, and as many more as are held back;
any K * B of these may be the trained ones, and the bound takes the shortest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.replay.scenario import ScenarioConfig
from rollout.replay.simulate import group_tokens, mean_step_tokens, nominal_s, step_seconds, valid_attempts
from rollout.replay.trace import GroupTrace, Trace, drawn_groups


@dataclass(frozen=True)
class IdleBound:
    """Least seconds of waiting over a run, for three reasons, and the time in steps (publishing included)."""

    in_order_s: float
    any_order_s: float
    machines_s: float
    train_s: float

    @property
    def share(self) -> float:
        """Least share of the time in which the trainer waits, for schedules that start groups in draw order."""
        return self._share(max(self.in_order_s, self.any_order_s, self.machines_s))

    @property
    def share_any_order(self) -> float:
        """The same for every schedule."""
        return self._share(max(self.any_order_s, self.machines_s))

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
            for started in range(filling, most + 1):
                new = sorted(spans_s[start : start + started])
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
    spans_s: Sequence[float], num_steps: int, per_step: int, max_lag: int, step_s: float
) -> float:
    """Least sum of waiting over `num_steps` steps of at most `step_s`, whichever of `spans_s` they train and in which order."""
    shortest = heapq.nsmallest(num_steps * per_step, spans_s)
    longest_of_batches = shortest[per_step - 1 :: per_step]
    return math.fsum(max(0.0, d - max_lag * step_s) for d in longest_of_batches) / (max_lag + 1)


def idle_bound(trace: Trace, scenario: ScenarioConfig, max_lag: int, num_held: int = 0) -> IdleBound:
    """The bounds for `scenario.num_steps` steps of the trace; num_held: draws that a schedule may hold back."""
    per_step, num_steps, site = scenario.groups_per_step, scenario.num_steps, scenario.site
    groups = drawn_groups(trace, (num_steps + max_lag) * per_step + num_held)
    spans = [nominal_s(group, scenario) for group in groups]
    steps, longest = _longest_steps(groups, trace, scenario, max_lag)
    train_s = num_steps * (site.step_s + site.publish_s)
    return IdleBound(
        in_order_s=_in_order(spans[: (num_steps + max_lag) * per_step], steps, per_step, max_lag),
        any_order_s=least_waiting_any_order(spans, num_steps, per_step, max_lag, longest),
        machines_s=max(0.0, _machines_s(groups, scenario) - train_s),
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


def _longest_steps(
    groups: Sequence[GroupTrace], trace: Trace, scenario: ScenarioConfig, max_lag: int
) -> tuple[list[float], float]:
    """The longest that each step could be when groups start in order, and that any step could be in any order."""
    mean, per_step, site = mean_step_tokens(trace, scenario), scenario.groups_per_step, scenario.site
    tokens = [group_tokens(group, scenario.episodes_per_group) for group in groups]

    def longest(within: Sequence[int]) -> float:
        return step_seconds(site, sum(heapq.nlargest(per_step, within)), mean) + site.publish_s

    reach = [
        slice(max(0, k - max_lag) * per_step, (k + max_lag + 1) * per_step) for k in range(scenario.num_steps)
    ]
    return [longest(tokens[within]) for within in reach], longest(tokens)


def _machines_s(groups: Sequence[GroupTrace], scenario: ScenarioConfig) -> float:
    site = scenario.site
    wanted = scenario.num_steps * scenario.groups_per_step
    desks, tokens = [], []
    for group in groups:
        attempts = valid_attempts(group, scenario)
        read_s = 1 / site.prefill_tokens_per_s
        desks.append(sum(e.boot_s + e.setup_s + e.span_s(site.decode_s, read_s) for e in attempts))
        tokens.append(sum(e.response_tokens for e in attempts))
    best_rate = site.max_batch / (site.decode_s + (site.max_batch - 1) * site.decode_s_per_request)
    return max(
        sum(heapq.nsmallest(wanted, desks)) / site.num_desktops,
        sum(heapq.nsmallest(wanted, tokens)) / (site.num_engines * best_rate),
    )
