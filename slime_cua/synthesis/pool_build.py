"""`slime-cua pool build`: play a policy over candidate tasks, keep those of moderate difficulty, split train and held out.

slime-cua pool build --config recipes/quickstart.yaml --out pools/starter
slime-cua pool build --config ... --out ... --tasks tasks/more --tasks tasks/other.jsonl model=runs/x/hf/sft pool.num_attempts=8

The config's model plays tasks.train (or --tasks) with its rollout section, as in training: engine, sandbox, context policy,
sampling. In OUT there are then

train.jsonl, heldout.jsonl   the pool: put them into tasks.train and tasks.heldout
pool.yaml                    pass rate and verdict of every candidate, and where they are from
run/                         the run directory of the attempts

The same command continues an interrupted build, and with other bounds (pool.min_pass_rate, ...) chooses again from the same
attempts; more attempts (pool.num_attempts) add to those that are there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slime_cua.config.base import load
from slime_cua.config.run import RunConfig
from slime_cua.core.errors import ConfigError, DataError, InfrastructureError
from slime_cua.core.files import write_atomic
from slime_cua.core.types import Episode, Task
from slime_cua.data.episodes import EpisodeStore
from slime_cua.synthesis import pool

if TYPE_CHECKING:
    from slime_cua.synthesis.pool import Measured

PHASE = "pool"
CANDIDATES = "candidates.json"


def build(config: RunConfig, out: Path) -> str:
    """Build the pool in `out`; the report. `config.tasks.train` are the candidates, `config.run_dir` keeps the attempts."""
    from sandbox_cluster.tasks.loader import load_tasks

    if not config.tasks.train:
        raise ConfigError("there are no candidates: give --tasks, or tasks.train in the config")
    tasks = load_tasks(config.tasks.train)
    if not tasks:
        raise ConfigError(f"there is no candidate task in {', '.join(config.tasks.train)}")
    check_candidates(Path(config.run_dir), tasks)
    episodes = stored(config, tasks)
    if episodes is None:
        episodes = play(config, tasks)
    return choose(config, tasks, episodes, out)


def check_candidates(run_dir: Path, tasks: Sequence[Task]) -> None:
    """Note the candidates, or ConfigError when the attempts in `run_dir` are of other ones: items are known by their place."""
    path = run_dir / CANDIDATES
    new = {task.id: hashlib.sha256(task.model_dump_json().encode()).hexdigest() for task in tasks}
    if not path.exists():
        write_atomic(path, json.dumps(new).encode())
        return
    old: dict[str, str] = json.loads(path.read_text())
    if list(old.items()) == list(new.items()):
        return
    differences = {
        "gone": [task_id for task_id in old if task_id not in new],
        "new": [task_id for task_id in new if task_id not in old],
        "changed": [task_id for task_id in new if old.get(task_id, new[task_id]) != new[task_id]],
    }
    parts = [f"{len(ids)} {what}, for example {ids[0]}" for what, ids in differences.items() if ids]
    raise ConfigError(
        f"{run_dir} holds attempts at other candidates ({'; '.join(parts) or 'their order changed'}): "
        "bring those back, or give another --out"
    )


def items(config: RunConfig, tasks: Sequence[Task]) -> list[Task]:
    """The task of each attempt: all tasks once, then all again, so that a broken one does not fill a row of failures."""
    return list(tasks) * config.pool.num_attempts


def stored(config: RunConfig, tasks: Sequence[Task]) -> list[Episode] | None:
    """The attempts when all are there already and valid; None when some are to be played."""
    from slime_cua.launch.run_dir import RunDir

    store = EpisodeStore(Path(config.run_dir) / "episodes" / f"{PHASE}.jsonl")
    last = {group.group_id: group.episodes[-1] for group in store}
    keys = [f"{PHASE}-{number:05d}" for number in range(len(items(config, tasks)))]
    if not all(key in last and last[key].is_valid for key in keys):
        return None
    with RunDir(config):  # refuses a changed config, and a build that is at work
        return [last[key] for key in keys]


def play(config: RunConfig, tasks: Sequence[Task]) -> list[Episode]:
    """All attempts, those of an interrupted build included."""
    from slime_cua.launch.children import no_child_left
    from slime_cua.launch.guardian import guarded
    from slime_cua.launch.session import Session
    from slime_cua.launch.signals import interrupt_on_signals

    with interrupt_on_signals(), no_child_left(), guarded() as guardian, Session(config, guardian) as session:
        attempts = items(config, tasks)
        session.console.say(
            f"pool: {config.pool.num_attempts} attempts at each of {len(tasks)} candidates by {config.model}"
        )
        with session.engines(Path(config.model)):
            episodes: list[Episode] = session.play(
                "evaluate", PHASE, attempts, config.rollout.sampling.temperature, what="pool"
            )
        num_valid = float(sum(episode.is_valid for episode in episodes))
        session.run.finish_phase(PHASE, {"num_valid": num_valid, "num_declared": float(len(attempts))})
    return episodes


def choose(config: RunConfig, tasks: Sequence[Task], episodes: Sequence[Episode], out: Path) -> str:
    """Write train.jsonl, heldout.jsonl and pool.yaml to `out`; the report.

    Raises InfrastructureError when nothing was measured, DataError when no candidate is of moderate difficulty.
    """
    found = pool.measure(tasks, episodes, config.pool)
    if all(one.pass_rate is None for one in found):
        reasons = sorted({e.error or e.stop_reason for e in episodes if not e.is_valid})[:3]
        raise InfrastructureError(
            f"no candidate has {config.pool.min_valid_attempts} scored attempts (pool.min_valid_attempts): "
            + ("; ".join(reasons) or "every attempt has a score, but there are too few")
        )
    provenance = provenance_of(config)
    kept = [one for one in found if one.verdict == "kept"]
    summary = out / "pool.yaml"
    for name in (
        "train",
        "heldout",
    ):  # a build that is killed below leaves no side of an earlier one beside its own
        (out / f"{name}.jsonl").unlink(missing_ok=True)
    if not kept:
        write_atomic(summary, _summary(found, provenance, config))
        raise DataError(
            f"none of {len(found)} candidates has a pass rate within {config.pool.min_pass_rate:g} to "
            f"{config.pool.max_pass_rate:g}: give other candidates, or move pool.min_pass_rate or pool.max_pass_rate\n"
            + pool.report(found, [], [])
        )
    train, heldout = pool.split(kept, config.pool)
    if heldout:
        write_atomic(out / "heldout.jsonl", pool.task_lines(heldout, "heldout", provenance))
    write_atomic(out / "train.jsonl", pool.task_lines(train, "train", provenance))
    write_atomic(summary, _summary(found, provenance, config))
    files = " and ".join(
        str(out / f"{name}.jsonl") for name, side in (("train", train), ("heldout", heldout)) if side
    )
    return f"{pool.report(found, train, heldout)}\nwritten: {files}; every candidate: {summary}"


def provenance_of(config: RunConfig) -> dict[str, Any]:
    """What says where pass rates are from: the policy, how it was sampled, what it saw."""
    return {
        "model": config.model,
        "num_attempts": config.pool.num_attempts,
        "success_threshold": config.pool.success_threshold,
        "temperature": config.rollout.sampling.temperature,
        "context": config.rollout.context.name,
        "actions": list(config.rollout.action_space.actions),
        "max_turns": config.rollout.max_turns,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _summary(found: Sequence[Measured], provenance: dict[str, Any], config: RunConfig) -> bytes:
    rows = [
        {
            "id": one.task.id,
            "verdict": one.verdict,
            "pass_rate": one.pass_rate,
            "num_valid": len(one.rewards),
            "num_invalid": one.num_invalid,
            "cluster": one.cluster,
            "app": pool.app_of(one.task),
        }
        for one in found
    ]
    plain = {
        "provenance": provenance,
        "pool": config.pool.model_dump(mode="json"),
        "histogram": dict(pool.histogram(found)),
        "candidates": rows,
    }
    return bytes(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="slime-cua pool", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    builds = commands.add_parser(
        "build",
        help="roll out, measure, choose, split",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    builds.add_argument(
        "--config", type=Path, required=True, help="YAML of a run, e.g. recipes/quickstart.yaml"
    )
    builds.add_argument("--out", type=Path, required=True, help="folder for the pool")
    builds.add_argument(
        "--tasks", action="append", default=[], help="candidates: task file or folder; instead of tasks.train"
    )
    builds.add_argument("overrides", nargs="*", help="key=value, dotted, e.g. pool.num_attempts=4")
    arguments = parser.parse_args(argv)
    own = [f"run_dir={arguments.out / 'run'}"]
    if arguments.tasks:
        own.append(f"tasks.train=[{','.join(arguments.tasks)}]")
    config = load(RunConfig, arguments.config, [*own, *arguments.overrides])
    print(build(config, arguments.out))
    return 0
