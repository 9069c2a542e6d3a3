"""Memory, process and CPU limits of a desktop: cgroup v2 where delegated, else v1, else per-process limits only.

A desktop's groups carry its owner's label and slot in their name; they are joined before the sandbox starts, and removed with it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from slime_cua.config.sandbox import DesktopConfig

ROOT = Path("/sys/fs/cgroup")
FOLDER = "slime_cua"
_OPEN_FILES = 4096
_CPU_PERIOD_US = 100_000
_NICE = 10


@dataclass(frozen=True)
class Backend:
    """Where groups can be made: version 2 (one folder), version 1 (one folder a controller), or 0 (nowhere)."""

    version: int
    folders: tuple[Path, ...] = ()
    """Version 1: memory, pids and, with has_cpu, cpu."""
    has_cpu: bool = False
    """Whether groups limit CPU time, too."""


def find_backend(root: Path = ROOT) -> Backend:
    """The best backend of this machine; probing makes our parent folder where that is allowed."""
    own = _own_v2_folder(root)
    if own is not None and _can_make(own / FOLDER, "memory.max"):
        return Backend(2, (own / FOLDER,), has_cpu=_can_make(own / FOLDER, "cpu.max"))
    controllers = {"memory": "memory.limit_in_bytes", "pids": "pids.max"}
    folders = [root / name / FOLDER for name, _ in controllers.items()]
    if all(_can_make(folder, file) for folder, file in zip(folders, controllers.values(), strict=True)):
        cpu = root / "cpu" / FOLDER
        has_cpu = _can_make(cpu, "cpu.cfs_quota_us")
        return Backend(1, (*folders, cpu) if has_cpu else tuple(folders), has_cpu)
    return Backend(0)


def make_groups(backend: Backend, name: str, config: DesktopConfig) -> tuple[Path, ...]:
    """New groups called `name` with the limits of `config`. OSError when the kernel refuses or the name is taken."""
    memory_bytes = config.memory_mb << 20
    groups = tuple(folder / name for folder in backend.folders)
    for group in groups:
        group.mkdir(parents=True)
    if backend.version == 2:
        _write(groups[0] / "memory.max", memory_bytes)
        _write(groups[0] / "memory.swap.max", 0, must=False)
        _write(groups[0] / "pids.max", config.num_processes)
        if backend.has_cpu:
            quota = f"{int(config.num_cpus * _CPU_PERIOD_US)} {_CPU_PERIOD_US}"
            _write(groups[0] / "cpu.max", quota)
    elif backend.version == 1:
        _write(groups[0] / "memory.limit_in_bytes", memory_bytes)
        _write(groups[0] / "memory.memsw.limit_in_bytes", memory_bytes, must=False)
        _write(groups[1] / "pids.max", config.num_processes)
        if backend.has_cpu:
            _write(groups[2] / "cpu.cfs_period_us", _CPU_PERIOD_US)
            _write(groups[2] / "cpu.cfs_quota_us", int(config.num_cpus * _CPU_PERIOD_US))
    return groups


def join(groups: tuple[Path, ...], pid: int) -> None:
    """Put process `pid` (still without children) into the groups."""
    for group in groups:
        _write(group / "cgroup.procs", pid)


def remove_groups(groups: tuple[Path, ...], timeout_s: float = 5.0) -> None:
    """Kill what is left in the groups and remove them. Missing ones are fine; raises nothing."""
    deadline = time.monotonic() + timeout_s
    for group in groups:
        while group.is_dir() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            for pid in _members(group):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)


def sweep(backend: Backend, min_age_s: float = 60.0) -> int:
    """Remove groups that are empty and not fresh: left by owners that were killed. A running desktop's is never empty."""
    num_removed = 0
    for folder in backend.folders:
        for group in folder.iterdir() if folder.is_dir() else ():
            with contextlib.suppress(OSError):
                if (
                    group.is_dir()
                    and not _members(group)
                    and time.time() - group.stat().st_mtime >= min_age_s
                ):
                    group.rmdir()
                    num_removed += 1
    return num_removed


def process_limits(config: DesktopConfig, backend: Backend, is_own_user: bool) -> list[str]:
    """A `prlimit` command line before the program: what it hands down to all it starts. Without groups that limit CPU time,
    `nice` comes first: desktops then take what the host's own work leaves.

    Open files, no core dumps, file size, processes of its user (not `is_own_user`: the caller's other processes count,
    too), and without groups the data memory of each process.
    """
    others = 0 if is_own_user else _processes_of(os.getuid())
    limits = {
        "nofile": (resource.RLIMIT_NOFILE, _OPEN_FILES),
        "core": (resource.RLIMIT_CORE, 0),
        "fsize": (resource.RLIMIT_FSIZE, config.disk_mb << 20),
        "nproc": (resource.RLIMIT_NPROC, others + config.num_processes),
    }
    if backend.version == 0:
        limits["data"] = (resource.RLIMIT_DATA, config.memory_mb << 20)
    line = [] if backend.has_cpu else ["/usr/bin/nice", "-n", str(_NICE)]
    line.append("/usr/bin/prlimit")
    for name, (kind, value) in limits.items():
        _, hard = resource.getrlimit(kind)
        line.append(f"--{name}={value if hard == resource.RLIM_INFINITY else min(value, hard)}")
    return line


def memory_bytes(groups: tuple[Path, ...]) -> int | None:
    """Memory in use by the desktop of `groups`; None without groups."""
    for group in groups:
        for file in ("memory.current", "memory.usage_in_bytes"):
            with contextlib.suppress(OSError):
                return int((group / file).read_text())
    return None


def _own_v2_folder(root: Path) -> Path | None:
    for mount in (root, root / "unified"):
        if (mount / "cgroup.controllers").is_file():
            for line in Path("/proc/self/cgroup").read_text().splitlines():
                if line.startswith("0::"):
                    return mount / line[3:].lstrip("/")
    return None


def _can_make(folder: Path, file: str) -> bool:
    """Our parent folder exists and groups inside have the wanted controller. Tried with a group that is removed again."""
    probe = folder / f"probe-{os.getpid()}"
    try:
        if not folder.parent.is_dir():
            return False
        with contextlib.suppress(OSError):
            _enable(folder.parent)
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):
            _enable(folder)
        probe.mkdir()
        is_there = (probe / file).is_file() and os.access(probe / file, os.W_OK)
        probe.rmdir()
        return is_there
    except OSError:
        return False


def _enable(folder: Path) -> None:
    """Controllers for the groups in `folder` (version 2); without cpu where that is not delegated. OSError when refused."""
    control = folder / "cgroup.subtree_control"
    control.write_text("+memory +pids")
    with contextlib.suppress(OSError):
        control.write_text("+cpu")


def _members(group: Path) -> list[int]:
    try:
        return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _processes_of(uid: int) -> int:
    count = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == uid:
                    count += sum(1 for _ in (folder / "task").iterdir())
    return count


def _write(file: Path, value: int | str, must: bool = True) -> None:
    try:
        file.write_text(str(value))
    except OSError:
        if must:
            raise
