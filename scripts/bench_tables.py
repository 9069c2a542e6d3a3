"""What the benchmarks print: the machine by name, then a Markdown table of figures with the goals they are held against."""

from __future__ import annotations

import asyncio
import os
import platform
import time
import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path

START_S, PART_S = 300.0, 300.0
"""Deadlines of a service's start and of one part: a loaded machine is slow, a hanging part must not hold up the others."""


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    name: str
    value: str
    goal: str = ""
    """As text, e.g. "at most 20 ms"."""
    is_met: bool | None = None
    """None: no goal."""


def at_most(name: str, figure: float, most: float, unit: str = "", detail: str = "") -> Row:
    """A figure that should not be larger than `most`."""
    return Row(
        name, f"{figure:.4g} {unit}{detail}".strip(), f"at most {most:g} {unit}".strip(), bool(figure <= most)
    )


def at_least(name: str, figure: float, least: float, unit: str = "", detail: str = "") -> Row:
    """A figure that should not be smaller than `least`."""
    return Row(
        name,
        f"{figure:.4g} {unit}{detail}".strip(),
        f"at least {least:g} {unit}".strip(),
        bool(figure >= least),
    )


def machine() -> str:
    """Processor, cores, memory, system and the load now: without them a figure says nothing."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    release = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    return (
        f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}, {memory_gib:.0f} GiB, {release}, "
        f"kernel {platform.release()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}, "
        f"{time.strftime('%Y-%m-%d')}"
    )


class Table:
    """Printed row by row, so that a part which fails, or is broken off, takes none of the earlier ones along."""

    def __init__(self, title: str) -> None:
        self.num_failed = 0
        print(f"\n| {title} | | goal | |\n|---|---|---|---|", flush=True)

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            verdict = "" if row.is_met is None else "met" if row.is_met else "**missed**"
            print(f"| {row.name} | {row.value} | {row.goal} | {verdict} |", flush=True)

    async def part(self, name: str, rows: Awaitable[Sequence[Row]], timeout_s: float = PART_S) -> None:
        """The rows of one part; instead of them the reason why there are none."""
        try:
            async with asyncio.timeout(timeout_s):
                self.add(await rows)
        except Exception as error:
            self.num_failed += 1
            traceback.print_exc()
            reason = str(error).replace("|", "/").replace("\n", " ")
            if isinstance(error, TimeoutError):
                reason = f"no end within {timeout_s:g} s"
            print(
                f"| {name} | {type(error).__name__}: {reason[:200]} | runs to its end | **failed** |",
                flush=True,
            )

    def end(self) -> int:
        """Close the table with the load that it was made under; the exit code of its program."""
        print(f"| load at the end of this table | {os.getloadavg()[0]:.1f} | | |", flush=True)
        return 1 if self.num_failed else 0
