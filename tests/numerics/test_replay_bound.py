"""The bound on the trainer's waiting against brute force over all schedules of tiny traces."""

import itertools
import math
import random

import pytest

from rollout.replay.bound import least_waiting_any_order, least_waiting_in_order


def least_by_brute_force(spans, per_step, max_lag, step_s, in_order):
    """Least waiting over every first version and every batch of every group, from inequality (1) alone.

    step_s: one number, or one a step. All groups are trained.
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
        bound = least_waiting_any_order(spans, num_groups // per_step, per_step, max_lag, 7.0)
        assert bound <= least + 1e-9


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
    assert least_waiting_any_order([30.0, 30.0], 2, 1, 1, 10.0) == pytest.approx(20.0)
    assert least_waiting_in_order([5.0, 5.0, 5.0], 1, [10.0] * 3) == pytest.approx(5.0), (
        "only the first step waits"
    )
