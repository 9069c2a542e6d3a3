"""Admission keeps the lag bound by itself: whatever the order of events, no trained token is older than max_lag."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.scheduler import Scheduler


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


def test_a_running_group_with_an_old_token_holds_the_step_and_goes_first():
    s = Scheduler(groups_per_step=1, max_policy_lag=1, version=1, num_admitted=1)
    s.admit("slow", "t")
    s.admit("fast", "t")
    s.record_version("slow", 0)
    s.record_version("fast", 1)
    s.finish("fast")
    assert s.next_batch() is None, "slow's version-0 token would be two behind at the step after"
    s.finish("slow")
    assert s.next_batch() == ["slow"]


def test_dropped_groups_free_their_place():
    s = Scheduler(groups_per_step=1, max_policy_lag=0)
    s.admit("a", "t")
    assert s.capacity() == 0
    s.drop("a")
    assert s.capacity() == 1


def test_state_survives_json_bit_for_bit():
    s = Scheduler(groups_per_step=2, max_policy_lag=1)
    s.admit("a", "t1")
    s.record_version("a", 0)
    s.finish("a")
    again = Scheduler.from_state_dict(json.loads(json.dumps(s.state_dict())))
    assert again == s


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 3))
def test_no_trained_token_is_older_than_the_bound_and_nothing_deadlocks(seed, per_step, lag):
    rng = random.Random(seed)
    s = Scheduler(groups_per_step=per_step, max_policy_lag=lag)
    for _ in range(400):
        while s.capacity() and rng.random() < 0.8:
            s.admit(f"g{s.num_admitted}", "t")
        assert s.num_admitted - s.num_dropped <= (s.version + lag + 1) * per_step
        running = [g for g in s.groups.values() if not g.is_finished]
        if running:
            group = rng.choice(running)
            s.record_version(group.group_id, s.version)
            if rng.random() < 0.3:
                s.finish(group.group_id)
            elif rng.random() < 0.05:
                s.drop(group.group_id)
        batch = s.next_batch()
        if batch is not None:
            for group_id in batch:
                oldest = s.groups[group_id].oldest_version
                assert oldest is None or oldest >= s.version - lag
            s.trained(batch)
    for group in list(s.groups.values()):
        s.finish(group.group_id)
    while s.capacity():
        s.admit(f"g{s.num_admitted}", "t")
        s.finish(f"g{s.num_admitted - 1}")
    assert s.next_batch() is not None, "with everything finished a step can always start"
