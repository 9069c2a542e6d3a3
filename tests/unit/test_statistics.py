"""Evaluation numbers: denominators, bounds, equal family weights, paired intervals."""

import pytest

from slime_cua.evaluation.statistics import (
    Attempt,
    Feasibility,
    bootstrap_success,
    family_mean,
    feasibility,
    paired_bootstrap,
    summarise,
    task_means,
)


def attempts(passed=0, failed=0, infra=0, not_started=0):
    rows = [1.0] * passed + [0.0] * failed + [None] * (infra + not_started)
    return [
        Attempt(f"t{n}", "f", score, is_started=n < passed + failed + infra) for n, score in enumerate(rows)
    ]


def test_model_failures_are_zeros_and_infrastructure_failures_bound_the_result():
    s = summarise(attempts(passed=4, failed=5, infra=1))  # fail 3, format failure 1, step limit 1
    assert s.headline == pytest.approx(0.4)
    assert s.over_valid == pytest.approx(4 / 9)
    assert (s.num_declared, s.num_valid) == (10, 9)
    assert (s.lower, s.upper) == (pytest.approx(0.4), pytest.approx(0.5))


def test_missing_attempts_stop_publication_and_leave_bounds():
    s = summarise(attempts(passed=4, failed=2, not_started=4))
    assert s.headline is None
    assert s.coverage == "6/10"
    assert (s.lower, s.upper) == (pytest.approx(0.4), pytest.approx(0.8))


def test_giving_up_shows_although_it_scores_on_infeasible_tasks():
    def row(task, score, gave_up):
        return Attempt(task, "f", score, is_infeasible=task == "inf1", has_given_up=gave_up)

    rows = [row("inf1", 1.0, True), row("inf1", 0.0, False), row("inf1", 0.0, False), row("inf1", 0.0, False)]
    rows += [row("feas1", 0.0, True), row("feas1", 1.0, False), row("feas1", 1.0, False)]
    rates = feasibility(rows)
    assert (rates.feasible, rates.infeasible) == (pytest.approx(2 / 3), 0.25)
    assert rates.give_up_rate == pytest.approx(1 / 3)
    always = feasibility([row("inf1", 1.0, True), row("feas1", 0.0, True), row("feas1", None, True)])
    assert (always.feasible, always.infeasible, always.give_up_rate) == (0.0, 1.0, 1.0)
    assert feasibility([row("inf1", None, True)]) == Feasibility(None, None, None)


def test_families_weigh_the_same_whatever_their_size():
    rows = [Attempt(f"a{n}", "a", 1.0) for n in range(9)] + [Attempt("b", "b", 0.0)]
    assert family_mean(rows) == 0.5


def test_attempts_without_a_score_leave_the_task_mean():
    rows = [Attempt("a", "f", 1.0), Attempt("a", "f", None), Attempt("b", "f", None)]
    assert task_means(rows) == {"a": 1.0}


def test_paired_bootstrap_of_a_constant_gain_has_no_width():
    before = {f"t{n}": n / 20 for n in range(10)}
    after = {task: score + 0.25 for task, score in before.items()}
    family = dict.fromkeys(before, "f")
    interval = paired_bootstrap(after, before, family, num_replicates=200, seed=0)
    assert (interval.low, interval.mean, interval.high) == pytest.approx((0.25, 0.25, 0.25))


def test_bootstrap_interval_has_the_width_of_the_binomial():
    scores = {f"t{n}": float(n % 2) for n in range(400)}
    interval = bootstrap_success(scores, dict.fromkeys(scores, "f"), num_replicates=4000, seed=0)
    half_width = 1.96 * (0.25 / 400) ** 0.5
    assert interval.mean == 0.5
    assert interval.high - interval.low == pytest.approx(2 * half_width, rel=0.1)


def test_arms_without_a_common_task_are_refused():
    with pytest.raises(ValueError, match="no task was scored in both"):
        paired_bootstrap({"a": 1.0}, {"b": 1.0}, {"a": "f", "b": "f"}, num_replicates=10, seed=0)
