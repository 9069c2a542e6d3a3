"""Runs a command and reports the peak memory of all its processes together, shared pages counted once (PSS).

    python scripts/measure_memory.py [--every-s 2] -- bash recipes/quickstart.sh

Processes are the command's descendants, also those that were taken over by init: each carries a mark in its environment.
A part of it can be hidden from us (another user's processes, when we are not root); how many is said. Exit code: the command's.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

MARK = "SLIME_CUA_MEASURED"


@dataclass
class Peak:
    """The largest sum seen, and who held it."""

    pss_bytes: int = 0
    at_s: float = 0.0
    num_processes: int = 0
    by_program: Counter[str] = field(default_factory=Counter)
    num_hidden: int = 0
    num_samples: int = 0


def tree(root: int, mark: bytes) -> set[int]:
    """`root`, its descendants, and every process whose environment holds `mark`."""
    children: dict[int, list[int]] = {}
    found: set[int] = set()
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(path.name))
        try:
            if mark in (path / "environ").read_bytes():
                found.add(int(path.name))
        except OSError:
            continue
    waiting = [root, *found]
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        waiting += [child for child in children.get(pid, ()) if child not in found]
    return found


def pss_bytes(pid: int) -> int | None:
    """Proportional set size of one process; None when it may not be read, 0 when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except PermissionError:
        return None
    except OSError:
        return 0
    return 0


def program(pid: int) -> str:
    """A short name: the module of `python -m`, the title that Ray gives a worker, or the program."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return words[0].rsplit("/", 1)[-1].split(" ")[0] or "?"


def sample(root: int, mark: bytes, peak: Peak, started: float) -> None:
    """One look at the tree; `peak` keeps the largest."""
    sizes = {pid: pss_bytes(pid) for pid in tree(root, mark)}
    peak.num_samples += 1
    peak.num_hidden = max(peak.num_hidden, sum(size is None for size in sizes.values()))
    total = sum(size or 0 for size in sizes.values())
    if total > peak.pss_bytes:
        peak.pss_bytes, peak.at_s = total, time.monotonic() - started
        peak.num_processes = sum(bool(size) for size in sizes.values())
        peak.by_program = Counter()
        for pid, size in sizes.items():
            peak.by_program[program(pid)] += size or 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every-s", type=float, default=2.0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("give a command after --")
    value = secrets.token_hex(8)
    peak, started, is_over = Peak(), time.monotonic(), threading.Event()
    process = subprocess.Popen(command, env={**os.environ, MARK: value})

    def watch() -> None:
        while not is_over.wait(options.every_s):
            sample(process.pid, f"{MARK}={value}".encode(), peak, started)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        code = process.wait()
    finally:
        is_over.set()
        watching.join()
    report(peak, time.monotonic() - started)
    return code


def report(peak: Peak, seconds: float) -> None:
    hidden = f", {peak.num_hidden} processes could not be read" if peak.num_hidden else ""
    print(
        f"peak memory (PSS) {peak.pss_bytes / 2**30:.2f} GiB in {peak.num_processes} processes after {peak.at_s:.0f} s "
        f"of {seconds:.0f} s, {peak.num_samples} samples{hidden}",
        file=sys.stderr,
    )
    for name, size in peak.by_program.most_common(12):
        print(f"  {size / 2**20:8.0f} MiB  {name}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
