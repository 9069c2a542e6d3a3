"""Which screenshots of a run something still needs. Counted anew from the run directory, so the count cannot drift.

An image is *referenced* while a line in episodes/ names it. It is *needed* while training may still read it: its group is
stored and not trained, or trained after the oldest checkpoint that a resume may go back to, or its group is
unfinished, or the cold start has yet to train its demonstration. What is referenced and not needed has been consumed: reports
and people look at it, and it goes first when the store is full.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from slime_cua.launch.run_state import RunState

_HASH = re.compile(rb'"sha256":\s*"([0-9a-f]{64})"')
_FILE = re.compile(rb"([0-9a-f]{64})\.png")
DEMONSTRATIONS = "demonstrations.jsonl"
RL, RL_OPEN = "rl.jsonl", "rl_open"


def reference_counts(run_dir: Path) -> Counter[str]:
    """How many turns in episodes/ name each image, by SHA-256."""
    counts: Counter[str] = Counter()
    for path in sorted((run_dir / "episodes").rglob("*.jsonl")):
        for line in _lines(path, 0):
            counts.update(_hashes(line))
    return counts


def needed_images(run_dir: Path) -> set[str]:
    """Images that training may still read, by SHA-256. Images of episodes that run now are not on record yet."""
    episodes = run_dir / "episodes"
    needed: set[str] = set()
    if not is_phase_done(run_dir, "sft"):
        needed.update(_all_hashes(episodes / DEMONSTRATIONS, 0))
    if is_phase_done(run_dir, "rl"):
        return needed
    for path in sorted((episodes / RL_OPEN).glob("*.jsonl")):
        needed.update(_all_hashes(path, 0))
    state = RunState.load(run_dir)
    if state is None or state.rollout is None:
        needed.update(_all_hashes(episodes / RL, 0))
        return needed
    oldest_saved = min(state.checkpoints, default=0)
    places = [place for batch in state.batches[oldest_saved:] for place in batch.groups.values()]
    places += state.rollout["finished"].values()
    for place in places:
        needed.update(_hashes(next(_lines(episodes / RL, place), b"")))
    needed.update(_all_hashes(episodes / RL, state.rollout["store_bytes"]))
    return needed


def report_images(run_dir: Path) -> set[str]:
    """Images that the run's report shows, by SHA-256."""
    return {
        name
        for line in _lines(run_dir / "report_data.json", 0)
        for name in map(bytes.decode, _FILE.findall(line))
    }


def is_phase_done(run_dir: Path, name: str) -> bool:
    """Whether phases.json has the phase."""
    path = run_dir / "phases.json"
    return path.exists() and name in json.loads(path.read_text())


def _all_hashes(path: Path, start: int) -> Iterator[str]:
    for line in _lines(path, start):
        yield from _hashes(line)


def _lines(path: Path, start: int) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            file.seek(start)
            yield from file


def _hashes(line: bytes) -> Iterator[str]:
    return (match.decode() for match in _HASH.findall(line))
