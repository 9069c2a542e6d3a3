"""The main job as a process of its own: started, followed by its log, ended by signals, and what it leaves looked for."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests/e2e/main_job.yaml"
MARK = "SLIME_CUA_TEST_MARK"
END_S = 45.0
"""A run that was told to end is gone by then."""
DICE = "def call_rule_judge_1(result, expected):\n    import random\n    return random.random()\n"
"""A judge that throws dice: random weights score 0 everywhere, and where all score alike nothing is trained."""


def write_model(folder: Path) -> Path:
    """A checkpoint with random weights of the shape that the project ships."""
    from slime_cua.synthesis.initial_weights import InitConfig, write_initial_folder

    write_initial_folder(ROOT / "models/tiny_base", folder, InitConfig(), seed=0)
    return folder


def write_tasks(path: Path, split: str, judge: str = DICE, families: int = 2) -> Path:
    """Two tasks each of some families that need no set-up: three clicks and the end. Judged by `judge`."""
    actions = [
        {"type": "gui", "kind": "left_click", "point": {"x": 100.0 * n, "y": 500.0}} for n in (1, 2, 3)
    ]
    tasks = [
        {
            "id": f"{split}/{family}-{number}",
            "instruction": f"press button {number}.",
            "config": [],
            "family": f"family{family}",
            "split": split,
            "evaluator": {"judges": [{"result_getter": None, "expected_getter": None, "code": judge}]},
            "metadata": {
                "routes": {"gui": [*actions[: number + 1], {"type": "terminate", "status": "success"}]}
            },
        }
        for family in range(families)
        for number in range(2)
    ]
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


@dataclass
class Job:
    """One run directory and the processes that work on it, one after the other."""

    folder: Path
    overrides: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)
    """A command that runs the command."""
    process: subprocess.Popen[bytes] | None = None
    seen: dict[int, int] = field(default_factory=dict)
    """Start time of every process id that belonged to the run when it was looked at."""
    run_path: Path | None = None
    """Where the run directory is, if not in `folder`."""
    ray_folders: set[str] = field(default_factory=set)
    """Where Ray kept its sockets, of every look."""
    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def run_dir(self) -> Path:
        return self.run_path or self.folder / "run"

    @property
    def output(self) -> str:
        """What the last process printed."""
        return (self.folder / "output").read_text(errors="replace")

    def start(self) -> Job:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: self.mark}
        command = [*self.prefix, sys.executable, "-m", "slime_cua.train", "--config", str(CONFIG)]
        log = self.run_dir / "logs/driver.log"
        self.log_start = log.stat().st_size if log.exists() else 0
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*command, f"run_dir={self.run_dir}", *self.overrides],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**environment, **self.environment},
                start_new_session=True,
            )
        return self

    def log(self) -> str:
        """The driver's log since the start of the last process."""
        path = self.run_dir / "logs/driver.log"
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(self.log_start)
            return file.read().decode(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 400.0) -> None:
        """Until the driver has written `text`."""
        self.wait_until(lambda: text in self.log(), f"{text!r} in the log", timeout_s)

    def wait_until(self, is_true: Callable[[], bool], what: str, timeout_s: float = 400.0) -> None:
        """Until `is_true`, which is asked often but takes no more than a sixth of a core: the run needs it."""
        end = time.monotonic() + timeout_s
        while True:
            began = time.monotonic()
            if is_true():
                return
            assert self.process is not None and self.process.poll() is None, (
                f"ended before {what}:\n{self.output}"
            )
            assert time.monotonic() < end, f"no {what} within {timeout_s} s:\n{self.output}"
            time.sleep(max(0.05, 5 * (time.monotonic() - began)))

    def look(self) -> dict[int, str]:
        """Processes of the run now, by id, with their command lines; remembered for `assert_nothing_left`."""
        assert self.process is not None
        found = {pid: command_line(pid) for pid in tree(self.process.pid, f"{MARK}={self.mark}".encode())}
        self.seen |= {pid: ticks for pid in found if (ticks := start_ticks(pid)) is not None}
        self.ray_folders |= set(re.findall(r"/tmp/slime_cua_ray_\w+", " ".join(found.values())))
        return found

    def pids_of(self, part: str) -> list[int]:
        """Processes of the run whose command line holds `part`."""
        return sorted(pid for pid, line in self.look().items() if part in line)

    def kill(self, number: int, *, is_group: bool = False) -> None:
        """Send a signal to the driver or, as a terminal does, to its whole process group."""
        assert self.process is not None
        self.look()
        if is_group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def wait(self, timeout_s: float = 400.0) -> int:
        """The exit code; fails, with everything ended, when there is none in time (before pytest's own limit, which shows nothing)."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            output = self.output
            self.end()
            raise AssertionError(f"the run did not end within {timeout_s} s:\n{output}") from None

    def end(self) -> None:
        """Kill the driver and whatever is left of the run."""
        if self.process is not None:
            self.look()
            self.process.kill()
            self.process.wait()
            for pid in self.leftovers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def leftovers(self) -> dict[int, str]:
        """Processes that the run left behind."""
        marked = tree(0, f"{MARK}={self.mark}".encode())
        known = {pid for pid, ticks in self.seen.items() if start_ticks(pid) == ticks}
        return {pid: command_line(pid) for pid in marked | known if start_ticks(pid) is not None}

    def sockets(self) -> list[Path]:
        """Sockets that the run left on the disk."""
        parents = [at for place in (self.run_dir, *self.ray_folders) for at in os.walk(place)]
        return [path for at, _, names in parents for name in names if (path := Path(at, name)).is_socket()]

    def assert_nothing_left(self, timeout_s: float = 20.0) -> None:
        """No process, socket and mount of the run is there; those of a killed driver have a moment to notice."""
        end = time.monotonic() + timeout_s
        while (left := self.leftovers() or self.sockets()) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, left
        assert str(self.folder) not in Path("/proc/mounts").read_text()

    def sentence(self) -> str:
        """The error that the driver ended with."""
        lines = [line for line in self.output.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.output
        assert "Traceback" not in self.output, self.output
        return lines[0]


def make_job(folder: Path, model: Path, *overrides: str) -> Job:
    """A run in `folder` on tasks of its own."""
    train = write_tasks(folder / "train.jsonl", "train")
    heldout = write_tasks(folder / "heldout.jsonl", "heldout")
    return Job(folder, [f"model={model}", f"tasks.train=[{train}]", f"tasks.heldout=[{heldout}]", *overrides])


@contextlib.contextmanager
def ended(job: Job) -> Iterator[Job]:
    """`job`, and nothing of it after the block, whatever happens in it."""
    try:
        yield job
    finally:
        job.end()


def tree(root: int, mark: bytes) -> set[int]:
    """`root` (0: none) and its descendants, and every process with `mark` in its environment and its descendants."""
    children: dict[int, list[int]] = {}
    waiting = [root] if root else []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.name))
            if mark in (path / "environ").read_bytes():
                waiting.append(int(path.name))
    found: set[int] = set()
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def start_ticks(pid: int) -> int | None:
    """Start time of a process; None when it is gone or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
