"""Scores checkpoints of a run on its held-out tasks and writes what a person reads: table, report, exports checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.metrics import behaviour
from slime_cua.config.run import EvalConfig
from slime_cua.core.actions import TerminateAction
from slime_cua.core.errors import InfrastructureError
from slime_cua.core.files import write_atomic
from slime_cua.core.types import Episode, Task
from slime_cua.data.episodes import EpisodeStore
from slime_cua.evaluation.statistics import (
    Attempt,
    Interval,
    average_label,
    bootstrap_success,
    family_mean,
    feasibility,
    paired_bootstrap,
    pass_at_k,
    summarise,
    task_means,
    weighted,
)
from slime_cua.launch.session import Session, evenly
from slime_cua.observability.report import REPORT_DATA, write_report

ARMS = ("base", "sft", "rl")
MAX_FILMS, MAX_FRAMES = 8, 6


def evaluate_arm(session: Session, name: str, model: Path, fleet: Any = None) -> None:
    """Play the held-out tasks with the weights that the engines serve; with no fleet, engines start on `model`."""
    phase = f"eval_{name}"
    if name not in session.config.evaluation.arms or session.run.phase_result(phase) is not None:
        return
    if fleet is None:
        with session.engines(model) as own:
            evaluate_arm(session, name, model, own)
        return
    tasks = heldout(session)
    session.console.say(f"evaluating {name} on {len(tasks)} held-out episodes")
    episodes: list[Episode] = session.play(
        "evaluate", phase, tasks, session.config.evaluation.temperature, what=f"evaluating {name}"
    )
    attempts = attempts_of(episodes, tasks)
    success = family_mean(attempts)
    if success is None:
        reasons = sorted({episode.error or episode.stop_reason for episode in episodes})[:3]
        raise InfrastructureError(
            f"none of the {len(episodes)} held-out episodes of {name} has a score: {'; '.join(reasons)}"
        )
    values = {f"eval/success/{f}": v for f, v in by_family(attempts).items()}
    values |= {
        f"eval/{k}": v for k, v in behaviour(episodes).items() if "/" not in k and not k.startswith("resp")
    }
    summary = summarise(attempts)
    values |= _apart(attempts)
    values |= {
        "eval/success": success,
        "eval/coverage": summary.num_valid / summary.num_declared,
    }
    session.logger.log(values, step=ARMS.index(name), axis="eval")
    session.run.finish_phase(
        phase, {**values, "num_valid": summary.num_valid, "num_declared": summary.num_declared}
    )
    session.console.say(
        f"{name}: success {100 * values['eval/success']:.1f} % ({summary.num_valid} valid episodes)"
    )


def heldout(session: Session) -> list[Task]:
    """The held-out episodes to play: tasks by family in turn, each num_attempts times."""
    config = session.config.evaluation
    return evenly(session.tasks.heldout, config.num_tasks) * config.num_attempts


def attempts_of(episodes: Sequence[Episode], tasks: Sequence[Task]) -> list[Attempt]:
    """Episodes as rows of the statistics; the last of each item, in the tasks' order."""
    return [
        Attempt(
            task.id,
            task.family,
            episode.reward if episode.is_valid else None,
            is_infeasible=task.is_infeasible,
            has_given_up=_has_given_up(episode),
        )
        for episode, task in zip(episodes, tasks, strict=True)
    ]


def _has_given_up(episode: Episode) -> bool:
    action = episode.turns[-1].action if episode.turns else None
    return isinstance(action, TerminateAction) and action.status == "failure"


def _apart(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Metrics of feasible and infeasible tasks; a rate without attempts is left out."""
    rates = feasibility(attempts)
    named = {
        "eval/success_feasible": rates.feasible,
        "eval/success_infeasible": rates.infeasible,
        "eval/give_up_rate": rates.give_up_rate,
    }
    return {name: value for name, value in named.items() if value is not None}


def by_family(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Mean score over valid attempts, by family."""
    families = sorted({a.family for a in attempts})
    means = {f: family_mean([a for a in attempts if a.family == f]) for f in families}
    return {family: mean for family, mean in means.items() if mean is not None}


def finish(session: Session) -> None:
    """Write report_data.json and report.html, and print the table."""
    tasks = heldout(session)
    arms = [name for name in ARMS if session.run.phase_result(f"eval_{name}") is not None]
    episodes = {name: _stored(session, name) for name in arms}
    tables = [
        success_table(session.config.evaluation, session.config.seed, episodes, tasks),
        feasibility_table(episodes, tasks),
        _family_table(session, arms),
        _time_table(session),
    ]
    tables = [table for table in tables if table["rows"]]
    data = {
        "title": f"slime_cua: {session.run.path.name}",
        "subtitle": f"seed {session.config.seed}, model {session.config.model}",
        "tables": tables,
        "films": _films(session, arms, episodes, tasks),
    }
    write_atomic(session.run.path / REPORT_DATA, json.dumps(data).encode())
    page = write_report(session.run.path)
    for table in tables:
        print(f"\n{table['title']}\n" + plain_table(table["columns"], table["rows"]))
    session.console.say(f"report: {page}")


def _stored(session: Session, name: str) -> list[Episode]:
    groups = {g.group_id: g.episodes[-1] for g in EpisodeStore(session.run.episodes(f"eval_{name}"))}
    return [groups[key] for key in sorted(groups)]


def success_table(
    config: EvalConfig, seed: int, episodes: Mapping[str, Sequence[Episode]], tasks: Sequence[Task]
) -> dict[str, Any]:
    """Scores of the arms, each with what it was divided by. `episodes` of an arm are one for each of `tasks`, in their order."""
    family, k = {task.id: task.family for task in tasks}, config.num_attempts
    attempts = {name: attempts_of(each, tasks) for name, each in episodes.items()}
    means = {name: task_means(each) for name, each in attempts.items()}
    options = {"num_replicates": config.num_bootstrap, "seed": seed}
    rows, before = [], ""
    for name in episodes:
        interval = bootstrap_success(means[name], family, **options) if means[name] else None
        gain: Interval | None = None
        if before and means[name] and means[before]:
            gain = paired_bootstrap(means[name], means[before], family, **options)
        before = name
        shown = behaviour(episodes[name])
        rows.append(
            [
                name,
                str(interval) if interval else "-",
                str(gain) if gain else "-",
                *([_pass_cell(attempts[name], k)] if k > 1 else []),
                f"{shown['turns_mean']:.1f}",
                f"{100 * shown['code_action_rate']:.0f} %",
                f"{100 * shown['format_error_rate']:.1f} %",
                _valid_cell(attempts[name]),
            ]
        )
    label = average_label(next(iter(attempts.values()))) if attempts else ""
    passes = [f"pass@{k}"] if k > 1 else []
    return {
        "title": "Held-out success",
        "note": f"Percent. {label}: a task's mean over its valid attempts, then over tasks, families weighted equally; 95 % interval by "
        "bootstrap over tasks; gain over the row above is paired."
        + (
            f" {passes[0]}: tasks with {k} valid attempts of which one scored 1, weighted alike."
            if k > 1
            else ""
        )
        + " Behind valid episodes: the mean over all of them if those without a score had scored 0, and 1.",
        "columns": [
            "arm",
            f"success ({label})",
            "gain",
            *passes,
            "turns",
            "code actions",
            "invalid responses",
            "valid episodes",
        ],
        "rows": rows,
    }


def _pass_cell(attempts: Sequence[Attempt], k: int) -> str:
    passes = pass_at_k(attempts, k)
    rate = weighted(passes, {attempt.task_id: attempt.family for attempt in attempts})
    return "-" if rate is None else f"{100 * rate:.1f} (of {len(passes)} tasks)"


def _valid_cell(attempts: Sequence[Attempt]) -> str:
    summary = summarise(attempts)
    counts = f"{summary.num_valid}/{summary.num_declared}"
    if summary.num_valid == summary.num_declared:
        return counts
    return f"{counts} ({100 * summary.lower:.1f} to {100 * summary.upper:.1f})"


def feasibility_table(episodes: Mapping[str, Sequence[Episode]], tasks: Sequence[Task]) -> dict[str, Any]:
    """Success where a task can be done and where it cannot, and how often the policy gave up where it can: one that always
    gives up is seen. No rows without infeasible tasks."""
    rows = []
    for name, each in episodes.items():
        rates = feasibility(attempts_of(each, tasks))
        values = (rates.feasible, rates.infeasible, rates.give_up_rate)
        rows.append([name, *("-" if value is None else f"{100 * value:.1f}" for value in values)])
    return {
        "title": "Feasible and infeasible tasks (percent)",
        "note": "Over valid attempts.",
        "columns": ["arm", "feasible", "infeasible", "gave up on feasible"],
        "rows": rows if any(task.is_infeasible for task in tasks) else [],
    }


def _family_table(session: Session, arms: list[str]) -> dict[str, Any]:
    results = {name: session.run.phase_result(f"eval_{name}") or {} for name in arms}
    prefix = "eval/success/"
    families = sorted({k.removeprefix(prefix) for r in results.values() for k in r if k.startswith(prefix)})
    rows = [[f, *(f"{100 * results[n].get(prefix + f, float('nan')):.0f}" for n in arms)] for f in families]
    return {"title": "By family (percent)", "note": "", "columns": ["family", *arms], "rows": rows}


def _time_table(session: Session) -> dict[str, Any]:
    names = ("sft", "rl")
    results = {name: session.run.phase_result(name) for name in names}
    rows = [[n, f"{r['seconds']:.0f}", f"{r['num_steps']:.0f}"] for n, r in results.items() if r is not None]
    return {"title": "Time", "note": "", "columns": ["phase", "seconds", "steps"], "rows": rows}


def _films(
    session: Session, arms: list[str], episodes: dict[str, list[Episode]], tasks: list[Task]
) -> list[dict[str, Any]]:
    """Film strips of the last arm: one episode a family."""
    if not arms:
        return []
    instructions = {t.id: t for t in tasks}
    seen: set[str] = set()
    films: list[dict[str, Any]] = []
    for episode in episodes[arms[-1]]:
        task = instructions[episode.task_id]
        if task.family in seen or not episode.turns or len(films) >= MAX_FILMS:
            continue
        seen.add(task.family)
        score = "invalid" if episode.reward is None else f"score {episode.reward:.2f}"
        frames = []
        for turn in episode.turns[:MAX_FRAMES]:
            image = turn.context_images[-1] if turn.context_images else None
            png = str(session.images.path(image).relative_to(session.run.path)) if image else None
            frames.append({"png": png, "caption": turn.response_text})
        films.append({"title": f"{task.family}: {task.instruction} ({arms[-1]}, {score})", "frames": frames})
    return films


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table for a terminal."""
    widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
    lines = [
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in [columns, *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)
