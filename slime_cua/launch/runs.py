"""`slime-cua runs`: what runs there are, what one did, and what of them may go.

slime-cua runs ls [ROOT]             every run below ROOT (default: runs): status, step, success, size, age
slime-cua runs show RUN              one of them: phases, scores, episodes, screenshots, checkpoints, failures
slime-cua runs gc RUN... [--dry-run] remove what nothing references: screenshots that no episode names, checkpoints that a newer
                                     one replaced, leftovers of interrupted writes. A run at work is left alone.
                                     --consumed: also screenshots that only trained or scored episodes name
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime_cua.core.errors import CheckpointError, ConfigError

Status = Literal["running", "done", "stopped", "new"]
ARMS = ("rl", "sft", "base")
MAX_DEPTH = 4
"""So far below ROOT runs are looked for."""
SIGNS_OF_LIFE = (
    "metrics.jsonl",
    "state.json",
    "sft_state.json",
    "phases.json",
    "config.yaml",
    "logs/driver.log",
)
NUM_FAULTS = 5


@dataclass(frozen=True)
class RunSummary:
    """A row of `runs ls`."""

    path: Path
    status: Status
    step: int
    num_steps: int | None
    """Asked for; None when the config cannot be read."""
    success: str
    """Held-out success of the latest arm that was scored, e.g. "rl 62.5 %"; empty when none was."""
    size_bytes: int
    age_s: float
    """Since the run wrote anything."""


def find_runs(root: Path) -> list[Path]:
    """Run directories at or below `root`, sorted. Raises ConfigError when there is no such folder."""
    if not root.is_dir():
        raise ConfigError(f"{root}: there is no such folder; name the one that holds your run directories")
    return sorted(_below(root, MAX_DEPTH))


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                yield from _below(Path(entry.path), depth - 1)


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "lock").is_file()


def check_run(folder: Path) -> Path:
    """`folder`. Raises ConfigError when it is no run directory."""
    if not is_run(folder):
        raise ConfigError(
            f"{folder} is no run directory (no config.yaml and lock in it); `slime-cua runs ls` lists them"
        )
    return folder


def is_running(run: Path) -> bool:
    """Whether a process holds the run's lock."""
    handle = os.open(run / "lock", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def summarise(run: Path) -> RunSummary:
    """What `runs ls` shows of a run; reads small files only, and sizes."""
    state, phases = _json(run / "state.json"), _json(run / "phases.json")
    step = int(state.get("version", 0))
    return RunSummary(
        path=run,
        status=_status(run, phases, step),
        step=step,
        num_steps=_num_steps(run),
        success=next((f"{arm} {score}" for arm in ARMS if (score := _success(phases, arm))), ""),
        size_bytes=size_bytes(run),
        age_s=time.time()
        - max(path.stat().st_mtime for name in SIGNS_OF_LIFE if (path := run / name).exists()),
    )


def _status(run: Path, phases: dict[str, Any], step: int) -> Status:
    if is_running(run):
        return "running"
    if "pool" in phases or ((run / "report.html").exists() and (step == 0 or "rl" in phases)):
        return "done"
    return "stopped" if phases or step or (run / "episodes").exists() else "new"


def _success(phases: dict[str, Any], arm: str) -> str:
    value = phases.get(f"eval_{arm}", {}).get("eval/success")
    return "" if value is None else f"{100 * value:.1f} %"


def _num_steps(run: Path) -> int | None:
    import yaml

    try:
        plain = yaml.safe_load((run / "config.yaml").read_text())
        return int(plain["num_steps"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        return None


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty when there is none. Raises CheckpointError for a file that is broken."""
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{path} is broken: {error}") from None


def size_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`; files that go meanwhile count 0."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_size
            except FileNotFoundError:
                continue
    return total


def listing(root: Path) -> str:
    """The table of `runs ls`."""
    runs = find_runs(root)
    if not runs:
        return f"no run below {root}"
    rows = [["run", "status", "step", "held-out success", "size", "last sign of life"]]
    for run in runs:
        one = summarise(run)
        steps = f"{one.step}/{'?' if one.num_steps is None else one.num_steps}"
        rows.append(
            [str(run), one.status, steps, one.success or "-", human(one.size_bytes), f"{ago(one.age_s)} ago"]
        )
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def human(num_bytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def ago(seconds: float) -> str:
    """The largest unit that fits: 90 -> "1 min"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def show(run: Path) -> str:
    """What `runs show` prints."""
    from slime_cua.launch.image_needs import needed_images, reference_counts

    one, phases = summarise(check_run(run)), _json(run / "phases.json")
    lines = [
        f"{run}: {one.status}, step {one.step} of {one.num_steps}, {human(one.size_bytes)}, "
        f"last sign of life {ago(one.age_s)} ago"
    ]
    lines += [f"  {name}: {_phase_text(result)}" for name, result in phases.items()]
    lines += _last_row(run)
    for path in sorted((run / "episodes").rglob("*.jsonl")):
        if path.parent.name != "rl_open":
            with path.open("rb") as file:
                lines.append(
                    f"  episodes/{path.name}: {sum(1 for _ in file)} groups, {human(path.stat().st_size)}"
                )
    images = list((run / "images").glob("*/*.png"))
    referenced, needed = reference_counts(run), needed_images(run)
    lines.append(
        f"  images: {len(images)}, {human(sum(path.stat().st_size for path in images))}; "
        f"{sum(path.stem in referenced for path in images)} named by episodes, "
        f"{sum(path.stem in needed for path in images)} still needed to train"
    )
    kept = _json(run / "state.json").get("checkpoints", [])
    lines.append(f"  checkpoints: {', '.join(f'step {step}' for step in kept) or 'none'}")
    lines += [f"  hf/{path.name}: {human(size_bytes(path))}" for path in sorted((run / "hf").glob("*"))]
    return "\n".join([*lines, *_faults(run)])


def _phase_text(result: dict[str, Any]) -> str:
    wanted = ("eval/success", "num_valid", "num_declared", "num_steps", "seconds", "loss")
    return (
        ", ".join(f"{name.removeprefix('eval/')} {result[name]:.4g}" for name in wanted if name in result)
        or "done"
    )


def _last_row(run: Path) -> list[str]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut by a crash
        wanted = ("reward/mean", "loss/clip_fraction", "lag/max", "time/step_s", "time/wait_s")
        values = ", ".join(f"{name} {row['values'][name]:.3g}" for name in wanted if name in row["values"])
        if values:
            return [f"  last step's metrics: {values}"]
    return []


def _faults(run: Path) -> list[str]:
    path = run / "logs" / "faults.jsonl"
    faults = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [f"  failure: {fault['part']}: {fault['what']}" for fault in faults[-NUM_FAULTS:]]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="slime-cua runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    lists = commands.add_parser("ls", help="list runs")
    lists.add_argument("root", nargs="?", type=Path, default=Path("runs"))
    shows = commands.add_parser("show", help="one run")
    shows.add_argument("run", type=Path)
    collects = commands.add_parser("gc", help="remove what nothing references")
    collects.add_argument("runs", nargs="+", type=Path)
    collects.add_argument("--dry-run", action="store_true", help="only say what would go")
    collects.add_argument(
        "--consumed", action="store_true", help="also screenshots that training needs no more"
    )
    arguments = parser.parse_args(argv)
    if arguments.command == "ls":
        print(listing(arguments.root))
    elif arguments.command == "show":
        print(show(arguments.run))
    else:
        from slime_cua.launch.runs_gc import collect

        for run in arguments.runs:
            print(collect(check_run(run), is_dry=arguments.dry_run, with_consumed=arguments.consumed))
    return 0
