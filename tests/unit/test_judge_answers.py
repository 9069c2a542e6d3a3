"""A judge that writes its answer itself: what is no answer is no score, and no failure of the host. Options of several."""

from __future__ import annotations

import shutil

import pytest

from sandbox_cluster.judge.jail import Jail, JailConfig
from sandbox_cluster.judge.spec import parse


def test_each_function_of_a_list_has_its_own_options() -> None:
    value = {"type": "rule", "rules": "a"}
    evaluator = {
        "func": ["literal_match", "exact_match"],
        "result": [value, value],
        "expected": [value, value],
        "options": [{"ignore_case": True}, None],
    }
    assert [check.options for check in parse(evaluator).checks] == [{"ignore_case": True}, {}]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_what_is_no_answer_is_no_score() -> None:
    jail = Jail(JailConfig())
    for answer in ("5", "null", '[["score", 1]]', '{"score": null}', '{"score": "abc"}', "{}", "[" * 60_000):
        code = (
            "def call_rule_judge_1(result, expected):\n"
            f"    import os, sys\n    os.write(int(sys.argv[1]), {answer!r}.encode())\n    os._exit(0)\n"
        )
        job = {
            "kind": "code",
            "func": "call_rule_judge_1",
            "code": code,
            "arguments": [{"value": None}, {"value": None}],
        }
        verdict = await jail.run(job, {}, 30.0)
        assert verdict.score is None and "without an answer" in str(verdict.reason), answer[:20]
