"""Task samplers: estimates, weights, draws, state, and that no task starves."""

import collections
import json
import math

import pytest

from slime_cua.algo.frontier import DifficultyBandSampler, FrontierSampler, make_sampler
from slime_cua.algo.samplers import UniformSampler, WeightedClassSampler
from slime_cua.config.algo import FrontierConfig
from slime_cua.core.errors import ConfigError

TASKS = [f"task-{i}" for i in range(10)]


def every_sampler():
    return [
        FrontierSampler(TASKS, seed=1),
        DifficultyBandSampler(TASKS, seed=1),
        UniformSampler(TASKS, seed=1),
        WeightedClassSampler(
            TASKS,
            class_of={task: "direct" if i % 2 else "fallback" for i, task in enumerate(TASKS)},
            weight_of={"direct": 1.0, "fallback": 2.0},
            seed=1,
        ),
    ]


def test_estimates_move_by_one_minus_retention_towards_the_mean_of_a_group():
    sampler = FrontierSampler(["a", "b"], seed=0)
    sampler.update({"a": [1.0, 0.0, 1.0, 1.0]})
    assert sampler.estimates() == {"a": pytest.approx(0.9 * 0.5 + 0.1 * 0.75), "b": 0.5}
    other_reading = FrontierSampler(["a"], seed=0, reading="step")
    other_reading.update({"a": [True, False, True, True]})
    assert other_reading.estimates()["a"] == pytest.approx(0.1 * 0.5 + 0.9 * 0.75)


def test_a_task_never_tried_starts_at_its_familys_average():
    sampler = FrontierSampler(
        ["a", "b", "c", "d"], retention=0.75, seed=0, family_of={"a": "x", "b": "x", "c": "y"}
    )
    sampler.update({"a": [1.0, 1.0]})
    assert sampler.estimates() == {"a": 0.625, "b": 0.625, "c": 0.5, "d": 0.5}
    sampler.update({"b": [0.0]})
    # b's own estimate starts from the family's 0.625; the family's average moves as well, a's does not.
    assert sampler.estimates() == {"a": 0.625, "b": 0.46875, "c": 0.5, "d": 0.5}
    sampler.add_tasks(["e"])
    again = FrontierSampler([], retention=0.75, seed=0, family_of={"a": "x", "b": "x", "c": "y", "e": "x"})
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert again.estimates()["e"] == 0.46875


def test_start_half_ignores_families():
    for start, expected in (("half", 0.5), ("family", 0.55)):
        sampler = make_sampler(
            ["a", "b"], FrontierConfig(start=start), seed=0, family_of={"a": "x", "b": "x"}
        )
        sampler.update({"a": [1.0]})
        assert sampler.estimates()["b"] == pytest.approx(expected)


def test_invalid_outcomes_do_not_count():
    sampler = FrontierSampler(["a", "b"], seed=0)
    sampler.update({"a": [None, math.nan, 1.0], "b": [None, None]})
    assert sampler.estimates() == {"a": pytest.approx(0.55), "b": 0.5}
    with pytest.raises(ValueError, match=r"success 1.5 must be in \[0, 1\]"):
        sampler.update({"a": [1.5]})


def test_an_update_with_a_wrong_score_changes_nothing():
    sampler = FrontierSampler(["a", "b"], seed=0)
    sampler.sample(2)
    before = json.dumps(sampler.state_dict())
    with pytest.raises(ValueError, match="task b"):
        sampler.update({"a": [1.0], "b": [math.inf]})
    assert json.dumps(sampler.state_dict()) == before


def test_a_task_removed_and_added_again_keeps_its_draw_in_flight_until_it_ends():
    sampler = FrontierSampler(["a", "b"], seed=0)
    sampler.sample(2)
    sampler.remove_tasks(["a"])
    sampler.add_tasks(["a"])
    assert sampler.in_flight == {"a": 1, "b": 1}
    sampler.release("b")
    assert sampler.sample(1) == ["b"]
    sampler.release("a")
    assert sampler.in_flight == {"b": 1}


def test_weights_follow_the_formula():
    sampler = FrontierSampler(["easy", "half", "hard"], retention=0.0, seed=0)
    sampler.update({"easy": [1.0], "half": [0.5], "hard": [0.25]})
    g = [math.exp(-2.0), 1.0, math.exp(-0.5)]
    expected = [0.8 * value / sum(g) + 0.2 / 3 for value in g]
    assert list(sampler.weights().values()) == pytest.approx(expected)
    narrow = FrontierSampler(["easy", "half"], retention=0.0, sigma=0.05, uniform_mix=0.0, seed=0)
    narrow.update({"easy": [1.0], "half": [0.5]})
    assert narrow.weights()["easy"] == pytest.approx(0.05 / 1.05)


@pytest.mark.parametrize("sampler", every_sampler(), ids=lambda sampler: type(sampler).__name__)
def test_a_collection_has_no_task_twice_and_prefers_tasks_that_are_not_in_flight(sampler):
    first = sampler.sample(6)
    second = sampler.sample(4)
    assert len(set(first)) == 6 and set(second) == set(TASKS) - set(first)
    assert sampler.in_flight == dict.fromkeys(TASKS, 1)
    third = sampler.sample(10)
    assert sorted(third) == TASKS and sampler.in_flight == dict.fromkeys(TASKS, 2)
    sampler.update({task: [1.0] for task in TASKS})
    sampler.release("task-0")
    assert sampler.in_flight == dict.fromkeys(TASKS[1:], 1)
    for wrong in (0, 11):
        with pytest.raises(ValueError, match="cannot draw"):
            sampler.sample(wrong)


@pytest.mark.parametrize("sampler", every_sampler(), ids=lambda sampler: type(sampler).__name__)
def test_a_sampler_restored_from_json_goes_on_bit_for_bit(sampler):
    sampler.update({"task-3": [1.0, 1 / 3], "task-4": [0.1]})
    sampler.sample(5)
    state = json.loads(json.dumps(sampler.state_dict()))
    twin = next(one for one in every_sampler() if type(one) is type(sampler))
    twin.load_state_dict(state)
    for step in range(30):
        assert twin.weights() == sampler.weights()
        drawn = sampler.sample(4)
        assert twin.sample(4) == drawn
        outcome = {task: [(len(task) * step % 7) / 7, None] for task in drawn}
        sampler.update(outcome)
        twin.update(outcome)
    assert json.dumps(twin.state_dict()) == json.dumps(sampler.state_dict())


def test_the_state_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match=r"saved sampler is a UniformSampler.*set sampler.name"):
        FrontierSampler(TASKS, seed=0).load_state_dict(UniformSampler(TASKS, seed=0).state_dict())


def test_equal_outcomes_give_equal_draws_and_seeds_matter():
    draws = []
    for seed in (5, 5, 6):
        sampler = FrontierSampler(TASKS, seed=seed)
        mine = []
        for _ in range(20):
            drawn = sampler.sample(3)
            sampler.update({task: [0.2] for task in drawn})
            mine.append(drawn)
        draws.append(mine)
    assert draws[0] == draws[1] != draws[2]


def test_tasks_come_and_go_while_running():
    sampler = FrontierSampler(["a", "b"], seed=0)
    sampler.sample(2)
    sampler.update({"a": [1.0]})
    sampler.add_tasks(["c", "a"])
    sampler.remove_tasks(["b", "unknown"])
    sampler.update({"b": [1.0]})
    assert sampler.task_ids == ("a", "c") and sampler.in_flight == {}
    assert sampler.estimates() == {"a": pytest.approx(0.55), "c": 0.5}
    assert sorted(sampler.sample(2)) == ["a", "c"]
    sampler.remove_tasks(["a"])
    sampler.add_tasks(["a"])
    assert sampler.estimates()["a"] == 0.5


def test_draws_follow_the_weights():
    sampler = FrontierSampler(TASKS, retention=0.0, seed=3)
    sampler.update({task: [i / 9] for i, task in enumerate(TASKS)})
    weights = sampler.weights()
    counts = collections.Counter()
    for _ in range(20_000):
        (task,) = sampler.sample(1)
        sampler.release(task)
        counts[task] += 1
    for task in TASKS:
        sigma = math.sqrt(weights[task] * (1 - weights[task]) / 20_000)
        assert abs(counts[task] / 20_000 - weights[task]) < 5 * sigma


@pytest.mark.parametrize("options", [{}, {"uniform_mix": 0.0}, {"min_weight": 0.0}, {"sigma": 0.01}])
def test_no_task_starves_and_the_measured_gap_keeps_the_bound(options):
    sampler = FrontierSampler(TASKS, retention=0.0, seed=4, **options)
    sampler.update({task: [0.5] for task in TASKS[1:]} | {TASKS[0]: [1.0]})
    bound = sampler.max_expected_gap()
    assert min(sampler.weights().values()) >= 1 / bound - 1e-15
    gaps, last, draws = [], 0, 40_000
    for i in range(1, draws + 1):
        (task,) = sampler.sample(1)
        sampler.release(task)
        if task == TASKS[0]:
            gaps.append(i - last)
            last = i
    mean = sum(gaps) / len(gaps)
    assert mean <= bound * (1 + 5 / math.sqrt(len(gaps)))


def test_without_floor_and_mixture_the_bound_is_infinite():
    assert FrontierSampler(TASKS, min_weight=0.0, uniform_mix=0.0, seed=0).max_expected_gap() == math.inf
    assert FrontierSampler(["only"], seed=0).max_expected_gap() == pytest.approx(1.0)


def test_a_run_moves_from_easy_tasks_to_the_frontier():
    """A policy that solves task i once its skill passes i/10: mastered tasks are drawn less than those half solved."""
    sampler = FrontierSampler(TASKS, seed=7)
    counts = collections.Counter()
    for step in range(400):
        skill = 0.55
        drawn = sampler.sample(2)
        outcomes = {}
        for task in drawn:
            gap = skill - TASKS.index(task) / 10
            p = 1 / (1 + math.exp(-20 * gap))
            outcomes[task] = [p] * 8
            counts[task] += step >= 200
        sampler.update(outcomes)
    assert counts["task-5"] + counts["task-6"] > 2 * (counts["task-0"] + counts["task-9"])
    assert min(counts[task] for task in TASKS) > 0


def test_classes_weigh_as_labelled_and_missing_labels_are_named():
    sampler = WeightedClassSampler(
        ["a", "b"], class_of={"a": "x", "b": "y"}, weight_of={"x": 3.0, "y": 1.0}, seed=0
    )
    assert sampler.weights() == {"a": 0.75, "b": 0.25}
    with pytest.raises(ValueError, match="class 'z' has no weight"):
        sampler.set_classes({"c": "z"})
    with pytest.raises(ValueError, match="task c has no class"):
        sampler.add_tasks(["c"])
    with pytest.raises(ValueError, match="no class for task b"):
        WeightedClassSampler(["a", "b"], class_of={"a": "x"}, weight_of={"x": 1.0}, seed=0)


def test_difficulty_bands_prefer_tasks_inside():
    sampler = DifficultyBandSampler(["in", "out", "new"], retention=0.0, seed=0)
    sampler.update({"in": [0.5], "out": [1.0]})
    assert sampler.weights() == {"in": 1 / 2.1, "out": 0.1 / 2.1, "new": 1 / 2.1}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("frontier", FrontierSampler), ("uniform", UniformSampler), ("difficulty_bands", DifficultyBandSampler)],
)
def test_the_config_chooses_the_sampler(name, kind):
    assert type(make_sampler(TASKS, FrontierConfig(name=name), seed=0)) is kind


def test_weighted_classes_need_classes():
    config = FrontierConfig(name="weighted_classes")
    with pytest.raises(ConfigError, match="needs a class"):
        make_sampler(TASKS, config, seed=0)
    assert make_sampler(["a"], config, seed=0, class_of={"a": "direct"}).weights() == {"a": 1.0}


@pytest.mark.parametrize(
    "options", [{"sigma": 0.0}, {"target": 2.0}, {"retention": 1.0}, {"min_weight": -1}, {"uniform_mix": 2}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        FrontierSampler(TASKS, seed=0, **options)


def test_a_success_is_the_score_or_a_score_above_the_configured_threshold():
    scores = {"a": [0.4, None, 0.6, 0.5, math.nan]}
    for threshold, mean in ((None, 0.5), (0.5, 1 / 3), (0.55, 1 / 3), (0.3, 1.0)):
        sampler = make_sampler(["a"], FrontierConfig(retention=0.0, success_threshold=threshold), seed=0)
        sampler.update(scores)
        assert sampler.estimates()["a"] == pytest.approx(mean)
