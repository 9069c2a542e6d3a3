"""Evaluators of both forms on a fake desktop: what they score, what is invalid, what is refused when loaded."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_cluster.api import EvaluateReply, EvaluateRequest
from sandbox_cluster.judge.evaluate import evaluate
from sandbox_cluster.judge.jail import Jail, JailConfig
from sandbox_cluster.judge.spec import parse
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.fake import FakeProvider
from sandbox_cluster.tasks.setup import Setup
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.errors import TaskError

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
READS = "def call_rule_judge_{n}(result, expected):\n    return float(open(result).read() == {text!r})"


@pytest.fixture
async def desktop(tmp_path: Path) -> AsyncIterator[Desktop]:
    provider = FakeProvider(DesktopConfig(screen_wh_px=(64, 64)), tmp_path, "judge")
    yield await provider.boot(0)
    await provider.close()


def setup() -> Setup:
    return Setup(lambda _: None)


async def score(
    desktop: Desktop, evaluator: dict[str, Any], last_action: str | None = "DONE"
) -> EvaluateReply:
    request = EvaluateRequest(evaluator=evaluator, last_action=last_action)
    return await evaluate(desktop, request, Jail(JailConfig()), setup(), 120.0)


def judge(n: int = 1, text: str = "yes", path: str = "/home/user/a.txt", code: str = "") -> dict[str, Any]:
    return {
        "result_getter": {"type": "vm_file", "path": path},
        "expected_getter": None,
        "code": code or READS.format(n=n, text=text),
    }


async def test_the_score_is_the_mean_over_judges(desktop: Desktop) -> None:
    await desktop.put_file("/home/user/a.txt", b"yes")
    reply = await score(desktop, {"judges": [judge(1), judge(2), judge(3, "no"), judge(4, "no")]})
    assert reply.score == 0.5 and [check["score"] for check in reply.details["checks"]] == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]


async def test_one_invalid_judge_makes_the_whole_invalid(desktop: Desktop) -> None:
    await desktop.put_file("/home/user/a.txt", b"yes")
    bad = judge(code="def call_rule_judge_2(result, expected):\n    raise OSError('x')")
    reply = await score(desktop, {"judges": [judge(), bad]})
    assert reply.score is None and "call_rule_judge_2" in str(reply.invalid_reason)


async def test_a_judge_gets_commands_and_golden_copies(desktop: Desktop) -> None:
    await desktop.put_file("/home/user/golden", b"same\n")
    item = {
        "result_getter": {"type": "vm_command_line", "command": "echo same", "shell": True},
        "expected_getter": {"type": "vm_file", "path": "/home/user/golden"},
        "code": "def call_rule_judge_1(result, expected):\n    return float(result == open(expected).read())",
    }
    assert (await score(desktop, {"judges": [item]})).score == 1.0


async def test_a_golden_copy_is_what_the_set_up_wrote_whatever_became_of_it(desktop: Desktop) -> None:
    kept = setup()
    files = [
        {"path": "~/.golden", "content": "right"},
        {"path": "/home/user/a.txt", "content": "start"},
    ]
    await kept.run(desktop, [{"type": "upload_file", "parameters": {"files": files}}], 60.0)
    for path in ("/home/user/.golden", "/home/user/a.txt"):
        await desktop.put_file(path, b"anything")
    same = "def call_rule_judge_1(result, expected):\n    return float(open(result).read() == open(expected).read())"
    golden = {"type": "vm_file", "path": "/home/user/.golden"}
    request = EvaluateRequest(
        evaluator={"judges": [{**judge(code=same), "expected_getter": golden}]}, last_action="DONE"
    )
    assert (await evaluate(desktop, request, Jail(JailConfig()), kept, 120.0)).score == 0.0
    await desktop.put_file("/home/user/a.txt", b"right")
    assert (await evaluate(desktop, request, Jail(JailConfig()), kept, 120.0)).score == 1.0


async def test_a_file_that_is_not_there_is_none_to_the_judge(desktop: Desktop) -> None:
    code = "def call_rule_judge_1(result, expected):\n    return 0.0 if result is None else 1.0"
    assert (await score(desktop, {"judges": [judge(code=code)]})).score == 0.0


async def test_a_desktop_that_is_gone_gives_no_score(desktop: Desktop) -> None:
    await desktop.kill()
    for evaluator in (
        {"judges": [judge()]},
        {"func": "infeasible"},
        {"func": "exact_match", "expected": {"type": "rule", "rules": {"expected": 1}}},
    ):
        reply = await score(desktop, evaluator, "FAIL")
        assert reply.score is None and "SandboxError" in str(reply.invalid_reason)


FEASIBLE = {
    "func": "exact_match",
    "result": {"type": "rule", "rules": 1},
    "expected": {"type": "rule", "rules": {"expected": 1}},
}


@pytest.mark.parametrize(
    ("evaluator", "last_action", "right"),
    [
        ({"func": "infeasible"}, "FAIL", 1.0),
        ({"func": "infeasible"}, "DONE", 0.0),
        ({"func": "infeasible"}, None, 0.0),
        (FEASIBLE, "FAIL", 0.0),
        (FEASIBLE, "DONE", 1.0),
        (FEASIBLE, None, 1.0),
    ],
)
async def test_infeasible_tasks_are_right_only_when_given_up(
    desktop: Desktop, evaluator: dict[str, Any], last_action: str | None, right: float
) -> None:
    assert (await score(desktop, evaluator, last_action)).score == right


def matches(*wanted: int, conj: str = "and") -> dict[str, Any]:
    """An evaluator with one exact_match a number: 1 passes, 0 fails."""
    return {
        "func": ["exact_match"] * len(wanted),
        "result": [{"type": "rule", "rules": 1}] * len(wanted),
        "expected": [{"type": "rule", "rules": {"expected": one}} for one in wanted],
        "conj": conj,
    }


@pytest.mark.parametrize(
    ("evaluator", "right"),
    [
        (matches(1, 1), 1.0),
        (matches(1, 0), 0.0),
        (matches(0, 1, conj="or"), 1.0),
        (matches(0, 0, conj="or"), 0.0),
    ],
)
async def test_and_needs_all_or_needs_one(desktop: Desktop, evaluator: dict[str, Any], right: float) -> None:
    assert (await score(desktop, evaluator)).score == right


async def test_and_is_the_mean_of_scores_above_zero(desktop: Desktop) -> None:
    code = "def call_rule_judge_1(result, expected):\n    return 0.5"
    assert (await score(desktop, {"judges": [judge(code=code), judge(code=code)]})).score == 0.5


async def test_post_configuration_runs_before_the_judge(desktop: Desktop) -> None:
    post = [{"type": "execute", "parameters": {"command": "echo yes > /home/user/b", "shell": True}}]
    code = "def call_rule_judge_1(result, expected):\n    return float(open(result).read() == 'yes\\n')"
    assert (
        await score(desktop, {"judges": [judge(path="/home/user/b", code=code)], "postconfig": post})
    ).score == 1.0


async def test_a_kept_output_and_the_screen_size_can_be_judged(desktop: Desktop) -> None:
    post = [{"type": "execute", "parameters": {"command": "echo kept", "shell": True, "stdout": "out.txt"}}]
    code = "def call_rule_judge_1(result, expected):\n    return float(open(result).read() == 'kept\\n' and expected['width'] == 64)"
    item = {
        "result_getter": {"type": "cache_file", "path": "out.txt"},
        "expected_getter": {"type": "vm_screen_size"},
        "code": code,
    }
    assert (await score(desktop, {"judges": [item], "postconfig": post})).score == 1.0


METRICS: list[tuple[str, Any, Any, dict[str, Any], float]] = [
    ("exact_match", "a", {"expected": "a"}, {}, 1.0),
    ("match_in_list", "a", {"expected": ["b", "a"]}, {}, 1.0),
    ("is_in_list", ["a"], {"expected": "b"}, {}, 0.0),
    ("check_include_exclude", "red green", {"include": ["red"], "exclude": ["blue"]}, {}, 1.0),
    ("check_include_exclude", "red blue", {"include": ["red"], "exclude": ["blue"]}, {}, 0.0),
    ("check_include_exclude", None, {"include": []}, {}, 0.0),
    ("check_direct_json_object", '{"a": 1, "b": 2}', {"expected": {"a": 1}}, {}, 1.0),
    ("check_direct_json_object", "{broken", {"expected": {"a": 1}}, {}, 0.0),
    ("literal_match", "A", "a", {"ignore_case": True}, 1.0),
    ("literal_match", "A", {"expected": "A"}, {}, 0.0),
]


@pytest.mark.parametrize(("func", "result", "rules", "options", "right"), METRICS)
async def test_metrics_on_values(
    desktop: Desktop, func: str, result: Any, rules: Any, options: dict[str, Any], right: float
) -> None:
    evaluator = {
        "func": func,
        "result": {"type": "rule", "rules": result},
        "expected": {"type": "rule", "rules": rules},
        "options": options,
    }
    assert (await score(desktop, evaluator)).score == right


FILES: list[tuple[str, bytes, bytes, dict[str, Any], float]] = [
    ("compare_text_file", b"a  b\n", b"a b", {"ignore_blanks": True}, 1.0),
    ("compare_text_file", b"a  b\n", b"a b", {}, 0.0),
    ("compare_csv", b"a, b\n\nc,d\n", b"a,b\nc,d\n", {"strict": False}, 1.0),
    ("compare_csv", b"a,b\n", b"a,c\n", {}, 0.0),
    ("compare_json", b'{"b": 1, "a": [2]}', b'{"a": [2], "b": 1}', {}, 1.0),
    ("compare_json", b"{", b'{"a": 1}', {}, 0.0),
]


@pytest.mark.parametrize(("func", "result", "expected", "options", "right"), FILES)
async def test_metrics_on_files(
    desktop: Desktop, func: str, result: bytes, expected: bytes, options: dict[str, Any], right: float
) -> None:
    await desktop.put_file("/home/user/r", result)
    await desktop.put_file("/home/user/e", expected)
    evaluator = {
        "func": func,
        "result": {"type": "vm_file", "path": "/home/user/r", "dest": "r"},
        "expected": {"type": "vm_file", "path": "/home/user/e", "dest": "e"},
        "options": options,
    }
    assert (await score(desktop, evaluator)).score == right


async def test_a_missing_result_file_is_zero_and_a_missing_expected_one_is_invalid(desktop: Desktop) -> None:
    await desktop.put_file("/home/user/here", b"x")
    here, gone = ({"type": "vm_file", "path": f"/home/user/{name}"} for name in ("here", "gone"))
    assert (
        await score(desktop, {"func": "compare_text_file", "result": gone, "expected": here})
    ).score == 0.0
    reply = await score(desktop, {"func": "compare_text_file", "result": here, "expected": gone})
    assert reply.score is None and "set-up" in str(reply.invalid_reason)
    assert (await score(desktop, {"func": "file_exists", "result": here})).score == 1.0
    assert (await score(desktop, {"func": "file_exists", "result": gone})).score == 0.0


GETTER = {"type": "vm_file", "path": "/x"}
RULE = {"type": "rule", "rules": {"expected": 1}}
CODE = "def call_rule_judge_1(result, expected):\n    return 1"


@pytest.mark.parametrize(
    ("evaluator", "message"),
    [
        ({}, "neither"),
        ({"judges": []}, "at least one judge"),
        ({"judges": [{"code": CODE}]}, "result_getter"),
        ({"judges": [{"result_getter": GETTER, "code": "def f(:"}]}, "not valid Python"),
        ({"judges": [{"result_getter": GETTER, "code": "x = 1"}]}, "call_rule_judge_N"),
        ({"judges": [{"result_getter": GETTER, "code": "def f(a, b, c): return 1"}]}, "takes 3 arguments"),
        (
            {"judges": [{"result_getter": {"type": "crystal_ball"}, "code": CODE}]},
            "crystal_ball.*is unknown",
        ),
        ({"judges": [{"result_getter": {"type": "vm_file"}, "code": CODE}]}, "lacks path"),
        ({"judges": [{"result_getter": GETTER, "code": CODE, "colour": 1}]}, "unknown keys: colour"),
        ({"func": "compare_pptx_files"}, "expected is missing: compare_pptx_files needs it"),
        ({"func": "compare_image_text"}, "'compare_image_text' is not in this build: .*needs torch"),
        (
            {"func": "exact_match", "result": {"type": "googledrive_file"}, "expected": RULE},
            "needs a Google account",
        ),
        ({**matches(1, 1), "now": "2026-03-05T09:00:00"}, "must be a moment with its offset"),
        ({**matches(1, 1), "moon": 1}, "unknown keys: moon"),
        (
            {
                "func": "exact_match",
                "result": GETTER,
                "expected": {"type": "rule_relativeTime", "rules": {"relativeTime": {"from": "soon"}}},
            },
            "needs relativeTime.from and expected",
        ),
        (
            {"func": "compare_csv", "result": {**GETTER, "multi": True, "dest": []}, "expected": GETTER},
            "path and dest must be lists of one length",
        ),
        ({"func": "exact_match", "result": GETTER}, "expected is missing"),
        ({"func": ["exact_match"] * 2, "result": [GETTER]}, "as long as evaluator.func"),
        ({**matches(1, 1), "conj": "xor"}, "conj is 'xor'"),
    ],
)
def test_a_broken_evaluator_is_refused_with_its_field(evaluator: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        parse(evaluator)
