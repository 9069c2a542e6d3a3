"""Evaluators as task files write them, checked when they are loaded: an unknown word is an error then, not a score later.

Two forms. OS-Helix: {"judges": [{"result_getter": {...}, "expected_getter": {...} or null, "code": "def call_rule_judge_1..."}]}.
OSWorld: {"func": str or list, "result": ..., "expected": ..., "options": ..., "conj": "and" or "or"}. Both may have "postconfig", and
"now", the moment that relative dates refer to (ISO 8601 with its offset); without it that is the start of the set-up.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from sandbox_cluster.judge import metrics, relative_time
from sandbox_cluster.judge.kinds import GETTERS, REFUSED_GETTERS, REFUSED_METRICS, UPSTREAM
from slime_cua.core.errors import TaskError

_KEYS = {"func", "result", "expected", "options", "conj", "judges", "postconfig", "now"}
METRICS: dict[str, int] = {
    name: sum(p.default is p.empty for p in inspect.signature(function).parameters.values())
    for name, function in vars(metrics).items()
    if inspect.isfunction(function) and not name.startswith("_")
}
"""Metric -> arguments it must have: 1 needs no `expected`."""


@dataclass(frozen=True)
class Check:
    """One judge or one metric with where its two arguments come from."""

    kind: Literal["code", "metric", "upstream"]
    """A judge's code, a metric of ours, or one of desktop-env."""
    func: str
    result: dict[str, Any] | None
    expected: dict[str, Any] | None
    code: str = ""
    module: str = ""
    """Of desktop-env, for its metrics."""
    options: dict[str, Any] = field(default_factory=dict)
    has_expected: bool = True
    """False: the function takes the result alone."""


@dataclass(frozen=True)
class Evaluator:
    """A checked evaluator."""

    checks: tuple[Check, ...]
    conj: Literal["mean", "and", "or"]
    is_infeasible: bool = False
    """True: the task cannot be done; the right last action is FAIL."""
    postconfig: tuple[dict[str, Any], ...] = ()
    now_s: float | None = None
    """Unix time that relative dates refer to, if the task fixes it."""


def parse(evaluator: Mapping[str, Any]) -> Evaluator:
    """The checked form. Raises TaskError naming the field."""
    unknown = sorted(set(evaluator) - _KEYS)
    if unknown:
        raise TaskError(f"evaluator has unknown keys: {', '.join(unknown)}")
    postconfig, now_s = _steps(evaluator.get("postconfig")), _moment(evaluator.get("now"))
    if "judges" in evaluator:
        judges = evaluator["judges"]
        if not isinstance(judges, list | tuple) or not judges:
            raise TaskError("evaluator.judges must be a list with at least one judge")
        checks = tuple(_judge(judge, f"evaluator.judges[{index}]") for index, judge in enumerate(judges))
        return Evaluator(checks, "mean", postconfig=postconfig, now_s=now_s)
    if "func" not in evaluator:
        raise TaskError('evaluator has neither "func" (OSWorld) nor "judges" (OS-Helix)')
    if evaluator["func"] == "infeasible":
        return Evaluator((), "and", is_infeasible=True, postconfig=postconfig)
    return replace(_osworld(evaluator, postconfig), now_s=now_s)


def _moment(text: Any) -> float | None:
    """Unix time of an ISO 8601 moment."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        moment = None
    if moment is None or moment.tzinfo is None:
        raise TaskError(
            f"evaluator.now = {text!r} must be a moment with its offset: 2026-03-05T09:00:00+00:00"
        )
    return moment.timestamp()


def _steps(postconfig: Any) -> tuple[dict[str, Any], ...]:
    if postconfig is None:
        return ()
    if not isinstance(postconfig, list | tuple) or not all(isinstance(step, Mapping) for step in postconfig):
        raise TaskError("evaluator.postconfig must be a list of set-up steps")
    return tuple(dict(step) for step in postconfig)


def _judge(judge: Any, where: str) -> Check:
    if not isinstance(judge, Mapping) or "code" not in judge or "result_getter" not in judge:
        raise TaskError(f'{where} needs "result_getter" and "code"')
    unknown = set(judge) - {"result_getter", "expected_getter", "code", "weight", "description", "name"}
    if unknown:
        raise TaskError(f"{where} has unknown keys: {', '.join(sorted(unknown))}")
    code = judge["code"]
    try:
        tree = ast.parse(code)
    except (SyntaxError, TypeError, ValueError) as error:
        raise TaskError(f"{where}.code is not valid Python: {error}") from None
    names = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    named = [node for node in names if node.name.startswith("call_rule_judge")] or names[-1:]
    if len(named) != 1:
        raise TaskError(f"{where}.code must define one function call_rule_judge_N(result, expected)")
    num_arguments = len(named[0].args.args)
    if num_arguments not in (1, 2):
        raise TaskError(
            f"{where}.code: {named[0].name} takes {num_arguments} arguments; it must take result and expected"
        )
    return Check(
        kind="code",
        func=named[0].name,
        result=_getter(judge["result_getter"], f"{where}.result_getter"),
        expected=_getter(judge.get("expected_getter"), f"{where}.expected_getter"),
        code=code,
        has_expected=num_arguments == 2,
    )


def _osworld(evaluator: Mapping[str, Any], postconfig: tuple[dict[str, Any], ...]) -> Evaluator:
    is_list = isinstance(evaluator["func"], list | tuple)
    funcs = list(evaluator["func"]) if is_list else [evaluator["func"]]

    def column(name: str) -> list[Any]:
        value = evaluator.get(name)
        if not is_list:
            return [value]
        if value is None or value == []:
            return [None] * len(funcs)
        if not isinstance(value, list | tuple) or len(value) != len(funcs):
            raise TaskError(f"evaluator.{name} must be a list as long as evaluator.func ({len(funcs)})")
        return list(value)

    conj = evaluator.get("conj", "and")
    if conj not in ("and", "or"):
        raise TaskError(f'evaluator.conj is {conj!r}; it must be "and" or "or"')
    rows = zip(funcs, column("result"), column("expected"), column("options"), strict=True)
    checks = tuple(_metric(f"[{index}]" if is_list else "", *row) for index, row in enumerate(rows))
    return Evaluator(checks, conj, postconfig=postconfig)


def _metric(mark: str, func: Any, result: Any, expected: Any, options: Any) -> Check:
    if func in REFUSED_METRICS:
        raise TaskError(f"evaluator.func{mark} {func!r} is not in this build: {REFUSED_METRICS[func]}")
    module, num_needed = ("", METRICS[func]) if func in METRICS else UPSTREAM.get(func, ("", 0))
    if not num_needed:
        raise TaskError(
            f"evaluator.func{mark} {func!r} is unknown; this build has {', '.join(sorted(METRICS))}, infeasible, "
            f"and {len(UPSTREAM)} of desktop-env{_near(func, UPSTREAM)}"
        )
    if expected is None and num_needed > 1:
        raise TaskError(f"evaluator.expected{mark} is missing: {func} needs it")
    return Check(
        kind="upstream" if module else "metric",
        func=func,
        module=module,
        result=_getter(result, f"evaluator.result{mark}"),
        expected=_getter(expected, f"evaluator.expected{mark}"),
        options=dict(options or {}),
        has_expected=expected is not None,
    )


def _near(word: Any, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(str(word), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _getter(getter: Any, where: str) -> dict[str, Any] | None:
    if getter is None or getter == {}:
        return None
    if not isinstance(getter, Mapping) or "type" not in getter:
        raise TaskError(f'{where} must be null or {{"type": ...}}')
    kind = getter["type"]
    if kind in REFUSED_GETTERS:
        raise TaskError(f"{where}.type {kind!r} is not in this build: {REFUSED_GETTERS[kind]}")
    if kind not in GETTERS:
        raise TaskError(
            f"{where}.type {kind!r} is unknown{_near(kind, GETTERS)}; this build has {', '.join(sorted(GETTERS))}"
        )
    missing = [name for name in GETTERS[kind] if name not in getter]
    if missing:
        raise TaskError(f"{where} ({kind}) lacks {', '.join(missing)}")
    if kind == "rule_relativeTime":
        relative_time.check(getter["rules"], where)
    if getter.get("multi"):
        _check_several(getter, where)
    return dict(getter)


def _check_several(getter: Mapping[str, Any], where: str) -> None:
    """`path` and `dest` are lists of one length, and `gives` counts them."""
    paths, names = getter.get("path"), getter.get("dest")
    if not isinstance(paths, list) or not isinstance(names, list) or len(paths) != len(names):
        raise TaskError(f"{where}: with multi, path and dest must be lists of one length")
    if any(not isinstance(index, int) or not 0 <= index < len(paths) for index in getter.get("gives", [0])):
        raise TaskError(f"{where}.gives must count from 0 to {len(paths) - 1}")
