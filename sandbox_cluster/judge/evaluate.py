"""One evaluation: post-configuration, getters, judges, one score or the reason why there is none (I8)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sandbox_cluster.api import EvaluateReply, EvaluateRequest
from sandbox_cluster.judge.getters import Inputs, Scene, fetch
from sandbox_cluster.judge.jail import Jail, Verdict
from sandbox_cluster.judge.spec import Check, Evaluator, parse
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.tasks.setup import Setup
from slime_cua.core.errors import JudgeError, SandboxError, TaskError


async def evaluate(
    desktop: Desktop, request: EvaluateRequest, jail: Jail, setup: Setup, timeout_s: float
) -> EvaluateReply:
    """The score of the desktop as it is now. What goes wrong is in `invalid_reason`; nothing but cancellation is raised.

    OSWorld's rule for the last action: an infeasible task scores 1 for FAIL and else 0; any other task scores 0 for FAIL.
    """
    end = time.monotonic() + timeout_s
    try:
        evaluator = parse(request.evaluator)
        await setup.run(desktop, evaluator.postconfig, timeout_s)
        await desktop.screenshot()
        if evaluator.is_infeasible or request.last_action == "FAIL":
            score = float(evaluator.is_infeasible and request.last_action == "FAIL")
            return EvaluateReply(
                score=score, details={"rule": "infeasible" if evaluator.is_infeasible else "FAIL"}
            )
        verdicts = []
        for check in evaluator.checks:
            if time.monotonic() >= end:
                raise TimeoutError("no time was left for this judge")
            scene = Scene(
                desktop,
                Inputs(),
                setup.cache(desktop),
                jail,
                setup.fetch,
                setup.server(desktop),
                now_s=setup.started_s(desktop) if evaluator.now_s is None else evaluator.now_s,
                end_mono=end,
            )
            verdict = await _one(scene, check, setup.written(desktop))
            verdicts.append(verdict)
            if verdict.score is None or _is_decided(evaluator, verdict.score):
                break
        if not desktop.is_alive:
            raise SandboxError("the desktop ended while it was judged")
        return _combine(evaluator, verdicts)
    except (SandboxError, JudgeError, TaskError, TimeoutError) as error:
        return EvaluateReply(score=None, invalid_reason=f"{type(error).__name__}: {error}")


async def _one(scene: Scene, check: Check, written: Mapping[str, bytes]) -> Verdict:
    await fetch(scene, check.result)
    if check.kind == "code":
        scene.golden = written
    if check.has_expected:
        await fetch(scene, check.expected)
    job: dict[str, Any] = {"kind": check.kind, "func": check.func, "arguments": scene.inputs.arguments}
    job |= {"code": check.code} if check.kind == "code" else {"options": check.options}
    if check.kind == "upstream":
        job["module"] = check.module
    return await scene.jail.run(job, scene.inputs.files, scene.left_s())


def _is_decided(evaluator: Evaluator, score: float) -> bool:
    return (evaluator.conj == "and" and score == 0.0) or (evaluator.conj == "or" and score == 1.0)


def _combine(evaluator: Evaluator, verdicts: list[Verdict]) -> EvaluateReply:
    details = {
        "checks": [
            {
                "func": check.func,
                "score": verdict.score,
                **({"raised": verdict.raised} if verdict.raised else {}),
                **({"output": verdict.output} if verdict.output else {}),
            }
            for check, verdict in zip(evaluator.checks, verdicts, strict=False)
        ]
    }
    for check, verdict in zip(evaluator.checks, verdicts, strict=False):
        if verdict.score is None:
            return EvaluateReply(
                score=None, invalid_reason=f"{check.func}: {verdict.reason}", details=details
            )
    scores = [verdict.score for verdict in verdicts if verdict.score is not None]
    if evaluator.conj == "or":
        score = max(scores)
    elif evaluator.conj == "and" and 0.0 in scores:
        score = 0.0
    else:
        score = sum(scores) / len(scores)
    return EvaluateReply(score=score, details=details)
