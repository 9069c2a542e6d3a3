"""Admission keeps the lag bound by itself: whatever the order of events, no trained token is older than max_lag."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout.scheduler import Scheduler
from slime_cua.config.rollout import SchedulerConfig

cheap = settings(deadline=None, max_examples=40)


def drive(s: Scheduler, rng: random.Random, events: int = 250, flat_share: float = 0.0) -> dict[str, Counter]:
    """Random events; the lag of what is trained is checked at each step. Counts by task: admitted, trained, dropped."""
    seen = {name: Counter() for name in ("admitted", "trained", "stale")}
    lag, per_step = s.max_policy_lag, s.groups_per_step
    for _ in range(events):
        while s.capacity() and rng.random() < 0.8:
            task = f"t{rng.randrange(8)}"
            s.admit(f"g{s.num_admitted}", task)
            seen["admitted"][task] += 1
        bound = (s.version + lag + 1) * per_step + s.options.num_extra_groups
        assert s.num_admitted - s.num_dropped <= bound
        running = [g for g in s.groups.values() if not g.is_finished]
        if running:
            group = rng.choice(running)
            s.record_version(group.group_id, s.version)
            if rng.random() < 0.3:
                s.finish(group.group_id, rng.random() < flat_share)
            elif rng.random() < 0.05:
                s.drop(group.group_id)
        step(s, seen)
    return seen


def step(s: Scheduler, seen: dict[str, Counter]) -> bool:
    batch = s.next_batch()
    if batch is None:
        return False
    assert len(set(batch)) == s.groups_per_step
    for group_id in batch:
        oldest = s.groups[group_id].oldest_version
        if s.options.stale != "mask":
            assert oldest is None or oldest >= s.version - s.max_policy_lag
        seen["trained"][s.groups[group_id].task_id] += 1
    for group in s.trained(batch):
        assert s.options.stale == "drop"
        assert not group.is_protected, "what the step promised to wait for is never dropped"
        seen["stale"][group.task_id] += 1
    return True


def test_admission_stops_at_the_bound_and_goes_on_after_a_step():
    s = Scheduler(groups_per_step=2, max_policy_lag=1)
    for n in range(4):
        s.admit(f"g{n}", "t")
    assert s.capacity() == 0
    with pytest.raises(RuntimeError, match="lag bound"):
        s.admit("g4", "t")
    for n in range(2):
        s.record_version(f"g{n}", 0)
        s.finish(f"g{n}")
    assert s.next_batch() == ["g0", "g1"]
    s.trained(["g0", "g1"])
    assert (s.version, s.capacity()) == (1, 2)


def slow_and_fast(stale: str, **options) -> Scheduler:
    """Version 1, lag 1: `slow` runs with a token of version 0, `fast` is finished."""
    config = SchedulerConfig(stale=stale, **options)
    s = Scheduler(groups_per_step=1, max_policy_lag=1, version=1, num_admitted=1, options=config)
    s.admit("slow", "t-slow")
    s.admit("fast", "t-fast")
    s.record_version("slow", 0)
    s.record_version("fast", 1)
    s.finish("fast")
    return s


def test_a_running_group_with_an_old_token_holds_the_step_and_goes_first():
    s = slow_and_fast("wait")
    assert s.next_batch() is None, "slow's version-0 token would be two behind at the step after"
    s.finish("slow")
    assert s.next_batch() == ["slow"]


def test_mask_does_not_wait_and_says_below_which_version_nothing_is_trained():
    s = slow_and_fast("mask")
    assert s.next_batch() == ["fast"]
    assert s.trained(["fast"]) == []
    s.finish("slow")
    assert (s.next_batch(), s.oldest_trainable) == (["slow"], 1)
    s.trained(["slow"])
    assert (s.num_masked, s.num_dropped) == (1, 0)


def test_drop_does_not_wait_counts_what_it_lost_and_waits_for_that_task_the_next_time():
    s = slow_and_fast("drop")
    assert s.next_batch() == ["fast"]
    assert [group.group_id for group in s.trained(["fast"])] == ["slow"]
    assert (s.num_stale, s.num_dropped, s.version) == (1, 1, 2)
    s.admit("slow again", "t-slow")
    s.admit("fast again", "t-fast")
    s.record_version("slow again", 1)
    s.record_version("fast again", 2)
    s.finish("fast again")
    assert s.next_batch() is None, "t-slow lost max_task_drops groups in a row"
    s.finish("slow again")
    assert s.next_batch() == ["slow again"]


def test_protected_groups_without_a_token_count_as_due_when_the_next_token_is():
    """B = 1, L = 1: two protected groups without a token would both be due at version 1, and a step holds one."""
    s = Scheduler(1, 1, options=SchedulerConfig(stale="drop", num_extra_groups=1))
    for name in ("fast", "p", "q"):
        s.admit(name, name).is_protected = name != "fast"
    s.record_version("fast", 0)
    s.finish("fast")
    assert s.next_batch() is None
    s.record_version("p", 0)
    s.finish("p")
    assert s.next_batch() == ["p"]


def test_extra_groups_without_a_way_out_are_refused():
    with pytest.raises(ValidationError, match="mask or drop"):
        SchedulerConfig(num_extra_groups=2)
    s = Scheduler(1, 0, options=SchedulerConfig(num_extra_groups=2, stale="mask"))
    assert s.capacity() == 3


def test_dropped_groups_free_their_place():
    s = Scheduler(groups_per_step=1, max_policy_lag=0)
    s.admit("a", "t")
    assert s.capacity() == 0
    s.drop("a")
    assert s.capacity() == 1


def test_long_tasks_come_first_and_unknown_ones_stand_at_the_mean():
    def order(s: Scheduler, *tasks: str) -> list[str]:
        s.enqueue(tasks)
        return s.dequeue()

    s = Scheduler(10)
    assert order(s, "a", "b") == ["a", "b"], "nothing measured: the order of the draw"
    s.record_duration("long", 100.0)
    s.record_duration("short", 10.0)
    assert order(s, "short", "new", "long") == ["long", "new", "short"]
    for _ in range(8):
        s.record_duration("long", 1.0)
    assert order(s, "long", "short") == ["short", "long"], "estimates follow what is measured"
    s.record_duration("longest", 500.0)
    assert order(s, "long", "longest", "short") == ["longest", "short", "long"], "whatever was started before"
    s.options = SchedulerConfig(is_long_first=False)
    assert order(s, "long", "short") == ["long", "short"]


def test_tasks_drawn_ahead_start_in_rounds_from_long_to_short_and_none_waits_longer_than_two():
    s = Scheduler(1, 0, options=SchedulerConfig(num_ahead_groups=3))
    for number in range(20):
        s.record_duration(f"t{number}", float(number))
    started = []
    for draw in ([3, 9, 5, 1], [8], [10], [7], [2], [6], [4]):
        assert s.num_to_draw() == len(draw)
        s.enqueue(f"t{number}" for number in draw)
        (task,) = s.dequeue()
        started.append(int(task[1:]))
        s.admit(task, task)
        s.finish(task)
        s.trained([task])
    assert started == [9, 8, 5, 3, 2, 1, 10], "10 and 7 came too late for the first round"
    assert [s.dequeue()[0] for _ in range(1)] == ["t7"]


def test_a_task_that_is_drawn_again_and_again_does_not_hold_a_longer_one_back():
    s = Scheduler(1, 0, options=SchedulerConfig(num_ahead_groups=2))
    s.record_duration("often", 5.0)
    s.record_duration("long", 9.0)
    started = []
    for draw in (["often", "often", "often"], ["long"], *[["often"]] * 9):
        s.enqueue(draw)
        (task,) = s.dequeue()
        started.append(task)
        s.admit(task, task)
        s.finish(task)
        s.trained([task])
    assert started[:4] == ["often", "often", "often", "long"], "three waited when the round came to them"
    assert len(s.waiting) == 2


def test_flat_groups_are_filtered_up_to_a_bound_a_step():
    s = Scheduler(1, 1, options=SchedulerConfig(filters_flat_groups=True, max_filtered_per_step=2))
    kept = []
    for n in range(4):
        if s.capacity():
            s.admit(f"g{n}", "t")
            kept.append(s.finish(f"g{n}", is_flat=True))
    assert kept == [False, False, True, True]
    assert (s.num_filtered, s.num_dropped, s.num_flat_kept) == (2, 2, 2)
    s.trained(["g2"])
    s.admit("g9", "t")
    assert not s.finish("g9", is_flat=True), "the bound is a step's"


def test_state_survives_json_bit_for_bit():
    options = SchedulerConfig(stale="drop", filters_flat_groups=True)
    s = Scheduler(groups_per_step=2, max_policy_lag=1, options=options)
    drive(s, random.Random(5), 60, flat_share=0.5)
    s.record_duration("t1", 0.1)
    again = Scheduler.from_state_dict(json.loads(json.dumps(s.state_dict())), options)
    assert again == s


def finish_all(s: Scheduler, seen: dict[str, Counter]) -> None:
    """With everything finished a step can always start, again and again."""
    for _ in range(3):
        while s.capacity():
            s.admit(f"g{s.num_admitted}", "t0")
        for group in list(s.groups.values()):
            s.record_version(group.group_id, s.version)
            if not group.is_finished:
                s.finish(group.group_id)
        assert step(s, seen)


@cheap
@given(
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from(["wait", "mask", "drop"]),
    st.integers(0, 3),
    st.integers(0, 2),
)
def test_no_trained_token_is_older_than_the_bound_and_nothing_deadlocks(
    seed, per_step, lag, stale, extra, task_drops
):
    options = SchedulerConfig(
        stale=stale, num_extra_groups=extra if stale != "wait" else 0, max_task_drops=task_drops
    )
    s = Scheduler(per_step, lag, options=options)
    seen = drive(s, random.Random(seed))
    finish_all(s, seen)
    assert sum(seen["trained"].values()) == s.version * per_step
    assert s.num_admitted == s.num_dropped + s.version * per_step + len(s.groups), (
        "every group is counted once"
    )
    assert s.num_stale == sum(seen["stale"].values())


@cheap
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(0, 2), st.sampled_from(["wait", "drop"]))
def test_filtering_always_ends_even_if_every_group_is_flat(seed, per_step, lag, stale):
    options = SchedulerConfig(stale=stale, filters_flat_groups=True, max_filtered_per_step=3)
    s = Scheduler(per_step, lag, options=options)
    rng = random.Random(seed)
    seen = {name: Counter() for name in ("trained", "stale")}
    budget = 6 * (3 + 2 * per_step)
    while s.version < 6:
        assert budget > 0, "a step comes after at most max_filtered_per_step refills"
        while s.capacity():
            s.admit(f"g{s.num_admitted}", "t")
        running = [g for g in s.groups.values() if not g.is_finished]
        if running:
            group = rng.choice(running)
            s.record_version(group.group_id, s.version)
            s.finish(group.group_id, is_flat=True)
            budget -= 1
        while step(s, seen):
            pass
    assert s.num_filtered <= 3 * (s.version + 1)


@cheap
@given(
    st.integers(0, 10_000), st.integers(1, 3), st.integers(0, 2), st.sampled_from(["wait", "mask", "drop"])
)
def test_a_task_that_is_always_slowest_is_trained_under_every_option(seed, per_step, lag, stale):
    s = Scheduler(per_step, lag, options=SchedulerConfig(stale=stale))
    rng = random.Random(seed)
    trained, ends = Counter(), {}
    for tick in range(200):
        while s.capacity():
            is_slow = not any(g.task_id == "slow" for g in s.groups.values())
            group = s.admit(f"g{s.num_admitted}", "slow" if is_slow else f"t{rng.randrange(4)}")
            ends[group.group_id] = tick + (25 if is_slow else rng.randint(1, 3))
        for group in [g for g in s.groups.values() if not g.is_finished]:
            s.record_version(group.group_id, s.version)
            if tick >= ends[group.group_id]:
                s.finish(group.group_id)
        batch = s.next_batch()
        if batch is not None:
            trained.update(s.groups[group_id].task_id for group_id in batch)
            s.trained(batch)
    assert trained["slow"] >= 2


def test_a_scheduler_that_goes_on_leaves_the_state_it_came_from_as_it_was():
    first = Scheduler(1, 1)
    first.enqueue(["a", "b"])
    first.record_duration("a", 10.0)
    state = first.state_dict()
    before = json.dumps(state)
    second = Scheduler.from_state_dict(state)
    second.record_duration("a", 90.0)
    second.record_duration("b", 1.0)
    second.dequeue()
    assert json.dumps(state) == before
