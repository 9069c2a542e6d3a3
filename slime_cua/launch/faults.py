"""What broke in a run, counted: single failures are mended, many in a short time end the run with a report."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from slime_cua.config.run import FaultConfig
from slime_cua.core.errors import InfrastructureError

NUM_LINES = 20
"""Of a log's end in the report."""
LINE_CHARS = 400


@dataclass(frozen=True)
class Fault:
    """One failure that was mended, or was one too many."""

    part: str
    """trainer, rollout, engine, gateway, host."""
    what: str
    where: str
    """File that says more."""
    time_s: float
    """Unix time, for people."""


class FaultLog:
    """Counts failures of a run. LOGS/faults.jsonl keeps each, LOGS/fault_report.txt says why a run gave up."""

    def __init__(self, config: FaultConfig, logs: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds that never jump; the window is measured by it."""
        self._config, self._logs, self._clock = config, logs, clock
        self._recent: deque[tuple[float, Fault]] = deque()

    def record(self, part: str, what: str, where: Path | str) -> None:
        """Count a failure. Raises InfrastructureError with the report's place when faults.max_failures are reached."""
        fault = Fault(part, what, str(where), time.time())
        now = self._clock()
        self._recent.append((now, fault))
        while now - self._recent[0][0] > 60 * self._config.window_minutes:
            self._recent.popleft()
        with (self._logs / "faults.jsonl").open("a") as file:
            file.write(json.dumps(asdict(fault)) + "\n")
        if len(self._recent) >= self._config.max_failures:
            self._give_up()

    def _give_up(self) -> None:
        faults = [fault for _, fault in self._recent]
        report = self._logs / "fault_report.txt"
        report.write_text(report_text(faults))
        parts = sorted({fault.part for fault in faults})
        raise InfrastructureError(
            f"{len(faults)} failures within {self._config.window_minutes:g} minutes (faults.max_failures = "
            f"{self._config.max_failures}), of {', '.join(parts)}; the last: {faults[-1].what}; report: {report}; "
            "the same command continues the run once the cause is gone"
        )


def report_text(faults: list[Fault]) -> str:
    """What failed, where and when, and the last lines of the logs that say more."""
    lines = ["Failures, oldest first:", ""]
    for fault in faults:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fault.time_s))
        lines.append(f"{when}  {fault.part}: {fault.what}")
    for where in dict.fromkeys(fault.where for fault in faults):
        for path in sorted(Path(where).parent.glob(Path(where).name)):
            lines += ["", f"Last lines of {path}:", *last_lines(path)]
    return "\n".join(lines) + "\n"


def last_lines(path: Path, count: int = NUM_LINES) -> list[str]:
    """The end of a text file; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - count * LINE_CHARS))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line[:LINE_CHARS] for line in text.splitlines()[-count:]]
