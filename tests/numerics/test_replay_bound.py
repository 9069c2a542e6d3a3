"""The bound on the trainer's waiting against brute force over all schedules of tiny traces."""

import itertools
import math
import random

import pytest

from rollout.replay.bound import (
    least_waiting_any_order,
    least_waiting_in_order,
    shortest_then_falling,
    waiting_of_order,
)


def least_by_brute_force(spans, per_step, max_lag, step_s, in_order):
    """Least waiting over every first version and every batch of every group, from inequality (1) alone.

    step_s: one number, one a step, or a function of the groups (their numbers) in a step. All groups are trained.
    """
    num_steps = len(spans) // per_step
    steps = step_s if isinstance(step_s, list) else [step_s] * num_steps
    slots = [y for y in range(num_steps) for _ in range(per_step)]
    best = math.inf
    for batch_of in set(itertools.permutations(slots)):
        choices = [range(max(0, y - max_lag), y + 1) for y in batch_of]
        for first in itertools.product(*choices):
            if in_order and any(a > b for a, b in itertools.pairwise(first)):
                continue
            best = min(best, waiting(spans, batch_of, first, steps))
    return best


def waiting(spans, batch_of, first, steps):
    ends, waited = [], 0.0
    for step, seconds in enumerate(steps):
        before = ends[-1] if ends else 0.0
        if callable(seconds):
            seconds = seconds([n for n, y in enumerate(batch_of) if y == step])
        ready = max(
            (ends[x - 1] if x else 0.0) + d
            for d, y, x in zip(spans, batch_of, first, strict=True)
            if y == step
        )
        waited += max(0.0, ready - before)
        ends.append(max(before, ready) + seconds)
    return waited


def traces(count, num_groups):
    for seed in range(count):
        rng = random.Random(seed)
        yield [round(rng.expovariate(1 / 20) + 1, 1) for _ in range(num_groups)]


def best_order(spans, per_step):
    return [spans[n] for n in shortest_then_falling(spans, per_step)]


@pytest.mark.parametrize(("per_step", "num_groups"), [(1, 5), (2, 6)])
def test_in_draw_order_the_program_finds_the_least_of_all_schedules(per_step, num_groups):
    for spans in traces(8, num_groups):
        steps = [10.0] * (num_groups // per_step)
        expected = least_by_brute_force(spans, per_step, 1, 10.0, in_order=True)
        assert least_waiting_in_order(spans, per_step, steps) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("max_lag", "per_step", "num_groups"), [(1, 1, 5), (1, 2, 6), (2, 1, 5), (3, 1, 5)])
def test_no_schedule_in_any_order_waits_less_than_the_bound(max_lag, per_step, num_groups):
    for spans in traces(8, num_groups):
        least = least_by_brute_force(spans, per_step, max_lag, 7.0, in_order=False)
        steps = [7.0] * (num_groups // per_step)
        bound = least_waiting_any_order(spans, per_step, max_lag, list(itertools.accumulate(steps)))
        reached = waiting_of_order(best_order(spans, per_step), steps, per_step, max_lag)
        assert bound <= least + 1e-9 <= reached + 2e-9


@pytest.mark.parametrize(("max_lag", "per_step", "num_groups"), [(1, 1, 5), (1, 2, 6), (2, 1, 5)])
def test_nor_where_each_group_makes_its_step_longer(max_lag, per_step, num_groups):
    for seed, spans in enumerate(traces(8, num_groups)):
        costs = [random.Random(seed + n).uniform(1.0, 12.0) for n in range(num_groups)]

        def step_s(members, costs=costs):
            return 2.0 + sum(costs[n] for n in members)

        def steps_by(key, spans=spans, step_s=step_s):
            order = sorted(range(len(spans)), key=key)
            return [step_s(order[k : k + per_step]) for k in range(0, len(order), per_step)]

        least = least_by_brute_force(spans, per_step, max_lag, step_s, in_order=False)
        longest = list(itertools.accumulate(steps_by(lambda n, costs=costs: -costs[n])))
        bound = least_waiting_any_order(spans, per_step, max_lag, longest)
        order = shortest_then_falling(spans, per_step)
        reached = waiting_of_order([spans[n] for n in order], steps_by(order.index), per_step, max_lag)
        assert bound <= least + 1e-9 <= reached + 2e-9


def test_the_schedule_that_reaches_the_bound_is_a_schedule():
    """Its waiting is what inequality (1) gives for its batches and first versions."""
    for spans in traces(8, 12):
        ordered = best_order(spans, 2)
        assert sorted(ordered) == sorted(spans)
        batch_of = [n // 2 for n in range(12)]
        first = [max(0, y - 1) for y in batch_of]
        reached = waiting_of_order(ordered, [7.0] * 6, 2, 1)
        assert reached == pytest.approx(waiting(ordered, batch_of, first, [7.0] * 6))


def test_for_many_groups_bound_and_schedule_meet():
    rng = random.Random(7)
    spans = [min(2400.0, rng.lognormvariate(6.0, 0.9)) for _ in range(800)]
    steps = [265.0] * 100
    bound = least_waiting_any_order(spans, 8, 1, list(itertools.accumulate(steps)))
    assert bound <= waiting_of_order(best_order(spans, 8), steps, 8, 1) <= 1.05 * bound


def test_no_schedule_in_draw_order_waits_less_than_the_bound_of_large_steps():
    for spans in traces(10, 6):
        least = least_by_brute_force(spans, 1, 2, 7.0, in_order=True)
        bound = least_waiting_in_order(spans, 2, [14.0] * 3, [7.0] * 3)
        assert bound <= least + 1e-9


def test_with_steps_of_different_times_the_longest_possible_one_still_bounds():
    for seed, spans in enumerate(traces(8, 5)):
        steps = [random.Random(seed + k).uniform(3.0, 9.0) for k in range(5)]
        least = least_by_brute_force(spans, 1, 1, steps, in_order=True)
        assert least_waiting_in_order(spans, 1, [9.0] * 5) <= least + 1e-9


def test_worked_by_hand():
    """B = 1, L = 1, steps of 10: both start at 0; the step of 30 waits 30 - 10 - 5 after the step of the 5."""
    assert least_waiting_in_order([30.0, 5.0], 1, [10.0, 10.0]) == pytest.approx(5 + 15)
    assert least_waiting_any_order([30.0, 30.0], 1, 1, [10.0, 20.0]) == pytest.approx(20.0)
    assert waiting_of_order([30.0, 45.0], [10.0, 10.0], 1, 1) == pytest.approx(30.0 + 5.0)
    assert shortest_then_falling([3.0, 9.0, 1.0, 5.0, 2.0], 2) == [4, 2, 1, 3, 0]
    assert least_waiting_in_order([5.0, 5.0, 5.0], 1, [10.0] * 3) == pytest.approx(5.0), (
        "only the first step waits"
    )
