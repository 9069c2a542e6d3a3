"""Does the main job learn, and from what? Several seeds, each with control arms that start where RL starts.

    python -m slime_cua.evaluation.learning --config recipes/quickstart.yaml --seeds 0,1,2 --out runs/learning

Arms of a seed:  main       base, SFT and SFT+RL
                 more_sft   goes on with the cold start's data for as long as RL took
                 shuffled   RL whose advantages are permuted over the batch
                 blind      SFT+RL scored with every screenshot grey
Each arm is a run of `slime_cua.train`, so an interrupted check goes on where it stopped. Writes OUT/table.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sandbox_cluster.tasks.loader import load_tasks
from slime_cua.config.base import load
from slime_cua.config.run import RunConfig
from slime_cua.core.errors import InfrastructureError
from slime_cua.core.files import write_atomic
from slime_cua.core.types import Task
from slime_cua.data.episodes import EpisodeStore
from slime_cua.evaluation.statistics import bootstrap_success, paired_bootstrap
from slime_cua.launch.cold_start import DEMONSTRATIONS

Scores = dict[str, float]
"""task -> mean score over its valid episodes."""
COMPARISONS = (
    ("sft", "base", "the cold start"),
    ("rl", "sft", "RL after it"),
    ("rl", "more_sft", "RL against more SFT for the same time"),
    ("shuffled", "sft", "RL with shuffled advantages"),
    ("blind", "rl", "grey screenshots"),
)
NEEDS_NO_SCREEN = ("files", "editor")
"""Families that a policy can solve by code from the instruction alone."""


def run_seed(config_path: Path, out: Path, seed: int, extra: Sequence[str]) -> dict[str, Scores]:
    """Scores of every arm of one seed; arms that are done are read, not run again."""
    folder = out / f"seed{seed}"
    main = folder / "main"
    _train(config_path, main, [f"seed={seed}", *extra])
    start, phases = main / "hf" / "sft", json.loads((main / "phases.json").read_text())
    later = [f"seed={seed}", f"model={start}", *extra]
    _share_demonstrations(main, folder / "more_sft")
    minutes = phases["rl"]["seconds"] / 60
    _train(
        config_path,
        folder / "more_sft",
        [*later, f"sft.minutes={minutes:.3f}", "num_steps=0", "evaluation.arms=[sft]"],
    )
    without_sft = [*later, "sft.num_episodes=0"]
    _train(
        config_path, folder / "shuffled", [*without_sft, "advantage.is_shuffled=true", "evaluation.arms=[rl]"]
    )
    _train(
        config_path,
        folder / "blind",
        [
            *without_sft,
            f"model={main / 'hf' / 'rl'}",
            "num_steps=0",
            "evaluation.arms=[sft]",
            "evaluation.is_image_blank=true",
        ],
    )
    return {
        **{name: scores(main, name) for name in ("base", "sft", "rl")},
        "more_sft": scores(folder / "more_sft", "sft"),
        "shuffled": scores(folder / "shuffled", "rl"),
        "blind": scores(folder / "blind", "sft"),
    }


def scores(run_dir: Path, arm: str) -> Scores:
    """Mean score by task of an evaluated arm of a run."""
    found: dict[str, list[float]] = {}
    for group in EpisodeStore(run_dir / "episodes" / f"eval_{arm}.jsonl"):
        episode = group.episodes[-1]
        if episode.is_valid and episode.reward is not None:
            found.setdefault(episode.task_id, []).append(episode.reward)
    return {task: float(np.mean(values)) for task, values in found.items()}


def over_seeds(by_seed: Sequence[Mapping[str, Scores]], arm: str) -> Scores:
    """Mean over seeds of the score of each task."""
    tasks = {task for seed in by_seed for task in seed[arm]}
    return {t: float(np.mean([s[arm][t] for s in by_seed if t in s[arm]])) for t in tasks}


def table(by_seed: Sequence[Mapping[str, Scores]], tasks: Sequence[Task], num_replicates: int = 10000) -> str:
    """The Markdown page: success by arm and seed, paired gains, families."""
    family = {task.id: task.family for task in tasks}
    options: dict[str, Any] = {"num_replicates": num_replicates, "seed": 0}
    arms = list(by_seed[0])
    pooled = {arm: over_seeds(by_seed, arm) for arm in arms}
    lines = ["| arm | success, 95 % interval | by seed | tasks |", "|---|---|---|---|"]
    for arm in arms:
        each = [100 * _mean(seed[arm], family) for seed in by_seed]
        interval = bootstrap_success(pooled[arm], family, **options)
        lines.append(f"| {arm} | {interval} | {', '.join(f'{v:.1f}' for v in each)} | {len(pooled[arm])} |")
    lines += ["", "| comparison | paired difference, 95 % interval | by seed |", "|---|---|---|"]
    for after, before, meaning in COMPARISONS:
        interval = paired_bootstrap(pooled[after], pooled[before], family, **options)
        each = [100 * (_mean(s[after], family) - _mean(s[before], family)) for s in by_seed]
        lines.append(
            f"| {after} - {before}: {meaning} | {interval} | {', '.join(f'{v:+.1f}' for v in each)} |"
        )
    names = sorted(set(family.values()))
    lines += ["", f"| family | {' | '.join(arms)} |", "|---" * (len(arms) + 1) + "|"]
    for name in names:
        cells = [_mean({t: v for t, v in pooled[a].items() if family[t] == name}, family) for a in arms]
        lines.append(f"| {name} | " + " | ".join(f"{100 * cell:.0f}" for cell in cells) + " |")
    return "\n".join([*lines, "", *_blind_line(pooled, family)]) + "\n"


def _blind_line(pooled: Mapping[str, Scores], family: Mapping[str, str]) -> list[str]:
    screen = {t for t, f in family.items() if f not in NEEDS_NO_SCREEN}
    base, rl, blind = (
        _mean({t: v for t, v in pooled[a].items() if t in screen}, family) for a in ("base", "rl", "blind")
    )
    gain, left = 100 * (rl - base), 100 * (blind - base)
    return [
        f"Families that need the screen: gain over base {gain:.1f} points, {left:.1f} of it left with grey screenshots."
    ]


def _mean(values: Scores, family: Mapping[str, str]) -> float:
    groups: dict[str, list[float]] = {}
    for task, value in values.items():
        groups.setdefault(family[task], []).append(value)
    return float(np.mean([np.mean(v) for v in groups.values()])) if groups else float("nan")


def _train(config: Path, run_dir: Path, overrides: Sequence[str]) -> None:
    if (run_dir / "report.html").exists():
        return
    print(f"== {run_dir}", flush=True)
    command = [
        sys.executable,
        "-m",
        "slime_cua.train",
        "--config",
        str(config),
        f"run_dir={run_dir}",
        *overrides,
    ]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise InfrastructureError(
            f"the run in {run_dir} ended with exit code {code}; the same command goes on"
        )


def _share_demonstrations(source: Path, target: Path) -> None:
    """Let the run in `target` find the demonstrations of `source` as its own."""
    episodes = target / "episodes" / f"{DEMONSTRATIONS}.jsonl"
    if not episodes.exists():
        episodes.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source / "images", target / "images", dirs_exist_ok=True)
        shutil.copy(source / "episodes" / f"{DEMONSTRATIONS}.jsonl", episodes)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("recipes/quickstart.yaml"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args(argv)
    config = load(RunConfig, arguments.config, arguments.overrides)
    tasks = load_tasks(config.tasks.heldout)
    done = []
    for seed in map(int, arguments.seeds.split(",")):
        done.append(run_seed(arguments.config, arguments.out, seed, arguments.overrides))
        write_atomic(arguments.out / "table.md", table(done, tasks).encode())
        print(table(done, tasks), flush=True)
    return 0


if __name__ == "__main__":
    from slime_cua.cli import guarded

    raise SystemExit(guarded(main, sys.argv[1:]))
