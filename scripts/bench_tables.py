"""What the benchmarks print: the machine by name, then a Markdown table of figures with the goals they are held against."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    name: str
    value: str
    goal: str = ""
    """As text, e.g. "at most 20 ms"."""
    is_met: bool | None = None
    """None: no goal."""


def at_most(name: str, figure: float, most: float, unit: str, detail: str = "") -> Row:
    """A figure that should not be larger than `most`."""
    return Row(name, f"{figure:.4g} {unit}{detail}", f"at most {most:g} {unit}", figure <= most)


def at_least(name: str, figure: float, least: float, unit: str, detail: str = "") -> Row:
    """A figure that should not be smaller than `least`."""
    return Row(name, f"{figure:.4g} {unit}{detail}", f"at least {least:g} {unit}", figure >= least)


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


def show(title: str, rows: list[Row]) -> None:
    """Print the table. The load behind the title is that of the end: look at both."""
    print(f"\n| {title} (load {os.getloadavg()[0]:.1f} at its end) | | goal | |\n|---|---|---|---|")
    for row in rows:
        verdict = "" if row.is_met is None else "met" if row.is_met else "**missed**"
        print(f"| {row.name} | {row.value} | {row.goal} | {verdict} |", flush=True)
