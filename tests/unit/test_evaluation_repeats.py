"""Several attempts a task: which score each gets, what an average is divided by, and what the printed table says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.actions import parse
from rollout.episode import _Trace
from sandbox_cluster.api import EvaluateRequest
from sandbox_cluster.judge.evaluate import evaluate
from sandbox_cluster.judge.jail import Jail, JailConfig
from sandbox_cluster.providers.fake import FakeProvider
from sandbox_cluster.tasks.setup import Setup
from slime_cua.config.run import EvalConfig
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.types import Episode, Task, Turn
from slime_cua.evaluation.arms import attempts_of, feasibility_table, plain_table, success_table
from slime_cua.evaluation.statistics import Attempt, average_label, family_mean, pass_at_k, task_means


def call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'custom_computer_use', 'arguments': arguments})}\n</tool_call>"


FAIL, DONE = (call(action="terminate", status=status) for status in ("failure", "success"))
CLICK = call(action="left_click", coordinate=[1, 2])
INFEASIBLE = Task(
    id="inf1", instruction="-", evaluator={"func": "infeasible"}, is_infeasible=True, family="f"
)
RULE = {"type": "rule", "rules": {"expected": 1}}
FEASIBLE = Task(
    id="feas1",
    instruction="-",
    evaluator={"func": "exact_match", "result": {"type": "rule", "rules": 1}, "expected": RULE},
    family="f",
)
ATTEMPTS: list[tuple[Task, str, float]] = [
    (INFEASIBLE, FAIL, 1.0),
    (INFEASIBLE, DONE, 0.0),
    (INFEASIBLE, CLICK, 0.0),
    (FEASIBLE, FAIL, 0.0),
    (FEASIBLE, DONE, 1.0),
    (FEASIBLE, CLICK, 1.0),
    (INFEASIBLE, f"<think>It cannot be done: {FAIL}</think>{CLICK}", 0.0),
]
"""Task, last response, right score. The checker of the feasible task would say 1 to each; a click last is the step limit."""


def episode(task: Task, response: str, reward: float | None) -> Episode:
    turn = Turn(
        index=0,
        starts_segment=True,
        context_ids=(),
        response_ids=(),
        response_logp=(),
        response_versions=(),
        response_text=response,
        action=parse(response),
    )
    return Episode(
        episode_id="e",
        group_id="g",
        task_id=task.id,
        turns=(turn,),
        reward=reward,
        stop_reason="invalid" if reward is None else "terminated",
        error="SandboxError: gone" if reward is None else None,
    )


async def test_each_attempt_is_scored_by_its_last_real_action(tmp_path: Path) -> None:
    provider = FakeProvider(DesktopConfig(screen_wh_px=(64, 64)), tmp_path, "judge")
    desktop = await provider.boot(0)
    scores = []
    for task, response, _ in ATTEMPTS:
        trace = _Trace("e", "g", task.id)
        trace.turns.extend(episode(task, response, 0.0).turns)
        request = EvaluateRequest(evaluator=task.evaluator, last_action=trace.last_action())
        reply = await evaluate(desktop, request, Jail(JailConfig()), Setup(lambda _: None), 120.0)
        scores.append(reply.score)
    await provider.close()
    assert scores == [right for _, _, right in ATTEMPTS]


def repeated() -> tuple[list[Task], list[Episode]]:
    return [one[0] for one in ATTEMPTS], [episode(*one) for one in ATTEMPTS]


def test_an_average_is_over_all_attempts_of_a_task_that_count_and_says_how_many_there_are() -> None:
    tasks, episodes = repeated()
    attempts = attempts_of(episodes, tasks)
    assert task_means(attempts) == {"inf1": pytest.approx(1 / 4), "feas1": pytest.approx(2 / 3)}
    labels = {task: average_label([a for a in attempts if a.task_id == task]) for task in ("inf1", "feas1")}
    assert labels == {"inf1": "avg@4", "feas1": "avg@3"}
    assert average_label(attempts) == "avg@3-4"


def test_an_attempt_without_a_score_leaves_its_task_as_heavy_as_the_others() -> None:
    rows = [Attempt("a", "f", 1.0), Attempt("a", "f", None), Attempt("b", "f", 0.0), Attempt("b", "f", 0.0)]
    assert family_mean(rows) == 0.5


def test_pass_at_k_is_the_chance_of_a_full_score_among_k_and_not_known_with_fewer() -> None:
    def rows(task: str, *scores: float | None) -> list[Attempt]:
        return [Attempt(task, "f", score) for score in scores]

    attempts = [
        *rows("one of four", 0, 1, 0, 0),
        *rows("nearly", 0.9, 0.9, 0.9, 0.9),
        *rows("three left", 1, 1, 0, None),
    ]
    assert pass_at_k(attempts, 4) == {"one of four": 1.0, "nearly": 0.0}
    # 2 of 4 without the one that passes: C(3, 2) / C(4, 2) = 1/2; of 3 of which two pass any 2 hold one: C(1, 2) = 0
    assert pass_at_k(attempts, 2) == {"one of four": 0.5, "nearly": 0.0, "three left": 1.0}


def test_the_table_names_attempts_passes_and_what_is_missing() -> None:
    tasks = [FEASIBLE, INFEASIBLE] * 2
    episodes = {
        "base": [episode(FEASIBLE, DONE, 0.0), episode(INFEASIBLE, FAIL, 1.0)] * 2,
        "rl": [
            episode(FEASIBLE, DONE, 1.0),
            episode(INFEASIBLE, FAIL, 1.0),
            episode(FEASIBLE, FAIL, 0.0),
            episode(INFEASIBLE, FAIL, None),
        ],
    }
    table = success_table(EvalConfig(num_attempts=2, num_bootstrap=100), 0, episodes, tasks)
    text = plain_table(table["columns"], table["rows"])
    columns = dict(zip(table["columns"], zip(*table["rows"], strict=True), strict=True))
    assert [cell.split()[0] for cell in columns["success (avg@2)"]] == ["50.0", "75.0"], text
    assert columns["pass@2"] == ("50.0 (of 2 tasks)", "100.0 (of 1 tasks)"), text
    assert columns["valid episodes"] == ("4/4", "3/4 (50.0 to 75.0)"), text
    apart = feasibility_table(episodes, tasks)
    assert apart["rows"] == [["base", "0.0", "100.0", "0.0"], ["rl", "50.0", "100.0", "50.0"]]
    done = {"base": [episode(FEASIBLE, DONE, 1.0)]}
    assert feasibility_table(done, [FEASIBLE])["rows"] == []


def test_one_attempt_a_task_has_no_pass_column() -> None:
    table = success_table(
        EvalConfig(num_bootstrap=100), 0, {"base": [episode(FEASIBLE, DONE, 1.0)]}, [FEASIBLE]
    )
    assert table["columns"][1] == "success (avg@1)" and not [c for c in table["columns"] if "pass" in c]
