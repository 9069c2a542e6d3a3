"""Does the main job learn, and from what? Several seeds, each with control arms that start where RL starts.

    python -m slime_cua.evaluation.learning --config recipes/quickstart.yaml --seeds 0,1,2 --out runs/learning
    ... --parallel 8        on a machine with 16 cores: eight runs side by side, each pinned to two of them

Arms of a seed:  main       base, SFT and SFT+RL
                 more_sft   goes on with the cold start's data for as long as RL took
                 shuffled   RL whose advantages are permuted over the batch
                 blind      SFT+RL scored with every screenshot grey
Each arm is a run of `slime_cua.train`, so an interrupted check goes on where it stopped. Writes OUT/table.md.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from sandbox_cluster.tasks.loader import load_tasks
from slime_cua.config.base import load
from slime_cua.config.run import RunConfig
from slime_cua.core.errors import ConfigError, InfrastructureError
from slime_cua.core.files import write_atomic
from slime_cua.core.types import Task
from slime_cua.data.episodes import EpisodeStore
from slime_cua.evaluation.statistics import bootstrap_success, paired_bootstrap
from slime_cua.launch.cold_start import DEMONSTRATIONS
from slime_cua.synthesis.starter.generate import FAMILIES, SCREEN_FAMILIES

Scores = dict[str, float]
"""task -> mean score over its valid episodes."""
COMPARISONS = (
    ("sft", "base", "the cold start"),
    ("rl", "sft", "RL after it"),
    ("rl", "more_sft", "RL against more SFT for the same time"),
    ("shuffled", "sft", "RL with shuffled advantages"),
    ("blind", "rl", "grey screenshots"),
)
CONTROL_MARGIN = 1.2
"""The control goes on with SFT for this times the minutes that RL is given: never less than RL's time with its last step."""
POLL_S = 1.0
NO_SCREEN = set(FAMILIES) - set(SCREEN_FAMILIES)


class Runner:
    """Runs arms, at most `num_parallel` at a time, each pinned to `num_cores` cores of its own while there are enough."""

    def __init__(
        self, config_path: Path, extra: Sequence[str], num_parallel: int = 1, num_cores: int = 2
    ) -> None:
        self._config_path, self._extra = config_path, list(extra)
        self._slots: queue.Queue[int] = queue.Queue()
        for slot in range(num_parallel):
            self._slots.put(slot)
        self._is_pinned, self._num_cores = num_parallel > 1, num_cores

    def train(self, run_dir: Path, overrides: Sequence[str]) -> None:
        """One run of slime_cua.train in `run_dir`, unless it is finished. Raises InfrastructureError when it fails."""
        if (run_dir / "report.html").exists():
            return
        slot = self._slots.get()
        try:
            print(f"== {run_dir}", flush=True)
            command = [sys.executable, "-m", "slime_cua.train", "--config", str(self._config_path)]
            command += [f"run_dir={run_dir}", *overrides, *self._extra]
            if not self._is_pinned:
                code = subprocess.run(command, check=False).returncode
            else:
                run_dir.mkdir(parents=True, exist_ok=True)
                with (run_dir / "console.log").open("a") as log:
                    code = subprocess.run(
                        ["taskset", "-c", self._cores(slot), *command], check=False, stdout=log, stderr=log
                    ).returncode
        finally:
            self._slots.put(slot)
        if code:
            raise InfrastructureError(
                f"the run in {run_dir} ended with exit code {code}; the same command goes on"
            )

    def _cores(self, slot: int) -> str:
        cores = sorted(os.sched_getaffinity(0))
        return ",".join(str(cores[(slot * self._num_cores + i) % len(cores)]) for i in range(self._num_cores))


def run_seed(runner: Runner, out: Path, seed: int, config: RunConfig) -> dict[str, Scores]:
    """Scores of every arm of one seed; arms that are done are read, not run again.

    The controls start as soon as the cold start is there. Raises InfrastructureError when an arm fails, or when RL took
    longer than the control that must have as much time.
    """
    folder = out / f"seed{seed}"
    main = folder / "main"
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(runner.train, main, [f"seed={seed}"])
        while not whole.done() and not (main / "hf" / "sft" / "config.json").exists():
            time.sleep(POLL_S)
        if whole.done():
            whole.result()
        later = [f"seed={seed}", f"model={main / 'hf' / 'sft'}"]
        _share_demonstrations(main, folder / "more_sft")
        minutes = config.minutes * CONTROL_MARGIN
        control = [f"sft.minutes={minutes:.3f}", "num_steps=0", "evaluation.arms=[sft]"]
        without_sft = [*later, "sft.num_episodes=0"]
        shuffled = [*without_sft, "advantage.is_shuffled=true", "evaluation.arms=[rl]"]
        arms = [
            whole,
            pool.submit(runner.train, folder / "more_sft", [*later, *control]),
            pool.submit(runner.train, folder / "shuffled", shuffled),
        ]
        for arm in arms:
            arm.result()
    blind = [f"seed={seed}", f"model={main / 'hf' / 'rl'}", "sft.num_episodes=0", "num_steps=0"]
    runner.train(folder / "blind", [*blind, "evaluation.arms=[sft]", "evaluation.is_image_blank=true"])
    _check_equal_time(main, folder / "more_sft")
    return {
        **{name: scores(main, name) for name in ("base", "sft", "rl")},
        "more_sft": scores(folder / "more_sft", "sft"),
        "shuffled": scores(folder / "shuffled", "rl"),
        "blind": scores(folder / "blind", "sft"),
    }


def _check_equal_time(main: Path, control: Path) -> None:
    rl_s, sft_s = (
        json.loads((run / "phases.json").read_text())[phase]["seconds"]
        for run, phase in ((main, "rl"), (control, "sft"))
    )
    if sft_s < rl_s:
        raise InfrastructureError(
            f"{control}: SFT went on for {sft_s:.0f} s, RL took {rl_s:.0f} s; delete the folder and set minutes a little lower"
        )


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
    screen = {t for t, f in family.items() if f not in NO_SCREEN}
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
    parser.add_argument(
        "--parallel", type=int, default=1, help="runs side by side, each on --cores of its own"
    )
    parser.add_argument("--cores", type=int, default=2, help="CPU cores of a run, with --parallel")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args(argv)
    config = load(RunConfig, arguments.config, arguments.overrides)
    tasks = load_tasks(config.tasks.heldout)
    if config.minutes <= 0:
        raise ConfigError("minutes must be above 0: the control arm needs to know RL's time")
    seeds = list(map(int, arguments.seeds.split(",")))
    runner = Runner(arguments.config, arguments.overrides, arguments.parallel, arguments.cores)
    with ThreadPoolExecutor(len(seeds) if arguments.parallel > 1 else 1) as pool:
        done = list(pool.map(lambda seed: run_seed(runner, arguments.out, seed, config), seeds))
    write_atomic(arguments.out / "table.md", table(done, tasks).encode())
    print(table(done, tasks), flush=True)
    return 0


if __name__ == "__main__":
    from slime_cua.cli import guarded

    raise SystemExit(guarded(main, sys.argv[1:]))
