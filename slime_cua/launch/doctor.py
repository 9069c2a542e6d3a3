"""`slime-cua doctor`: what this machine has for a run, what it lacks, and the line that brings it.

Exit code 1 when something that the embedded main job needs is missing; a GPU is a note, not a need.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

MIN_MEMORY_GB, MIN_DISK_GB, MIN_SHM_MB, MIN_OPEN_FILES = 8, 4, 300, 1024
PACKAGES = ("torch", "transformers", "megatron-core", "mcore_bridge", "ray", "wandb", "fastapi", "aiohttp")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    value: str
    remedy: str = ""
    """What to run or do; empty when all is well."""
    is_needed: bool = True
    """False: worth knowing, but the main job runs without it."""

    @property
    def mark(self) -> str:
        return "ok" if not self.remedy else "MISSING" if self.is_needed else "note"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="slime-cua doctor", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs"), help="where runs will be kept: its disk is looked at"
    )
    parser.add_argument("--config", type=Path, help="a run's YAML: its model and layout are looked at, too")
    parser.add_argument("overrides", nargs="*", help="key=value, dotted, with --config")
    options = parser.parse_args(argv)
    if options.overrides and options.config is None:
        parser.error("overrides need --config")
    all_checks = checks(options.run_dir)
    if options.config is not None:
        all_checks.append(lambda: _layout(options.config, options.overrides))
    findings = [finding for check in all_checks for finding in check()]
    print(report(findings))
    return 1 if any(finding.remedy and finding.is_needed for finding in findings) else 0


def checks(run_dir: Path) -> list[Callable[[], Iterable[Finding]]]:
    """All checks, cheap ones first."""
    return [
        _system,
        _memory,
        lambda: _disk(run_dir),
        _limits,
        _packages,
        _desktops,
        _groups,
        _ports,
        _torch,
        _gpus,
    ]


def report(findings: list[Finding]) -> str:
    """A table, then what to do, line by line."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"{f.mark:<8}{f.name:<{width}}  {f.value}" for f in findings]
    todo = [f for f in findings if f.remedy]
    if todo:
        lines += ["", "What to do:"]
        lines += [f"  {f.name}{'' if f.is_needed else ' (only if you want it)'}: {f.remedy}" for f in todo]
    needed = sum(f.is_needed for f in todo)
    lines += ["", f"{needed} thing(s) missing" if needed else "ready: bash recipes/quickstart.sh"]
    return "\n".join(lines)


def _system() -> Iterable[Finding]:
    is_linux = platform.system() == "Linux"
    remedy = "" if is_linux else "use Linux, or set sandbox.gateway_url to a gateway on a Linux machine"
    yield Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}", remedy)
    version = ".".join(map(str, sys.version_info[:3]))
    is_new = sys.version_info >= (3, 11)
    yield Finding("python", version, "" if is_new else "apt-get install python3.11, or set SLIME_CUA_PYTHON")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", str(cores), "" if cores >= 2 else "the quickstart wants 2 cores", is_needed=False)


def _memory() -> Iterable[Finding]:
    total_gb = memory_bytes() / 2**30
    remedy = (
        ""
        if total_gb > MIN_MEMORY_GB - 0.6
        else f"the quickstart wants {MIN_MEMORY_GB} GB: lower sandbox.num_desktops"
    )
    yield Finding("memory", f"{total_gb:.1f} GB", remedy, is_needed=False)
    try:
        shm_mb = shutil.disk_usage("/dev/shm").free >> 20
    except OSError:
        shm_mb = 0
    remedy = (
        "" if shm_mb >= MIN_SHM_MB else "mount -o remount,size=1G /dev/shm (in a container: --shm-size=1g)"
    )
    yield Finding("/dev/shm", f"{shm_mb} MB free (Ray's objects)", remedy, is_needed=False)


def _layout(path: Path, overrides: list[str]) -> Iterable[Finding]:
    """The legal layouts of the config's model, line by line, and what the config asks for. The table: trainer/layouts.py."""
    from slime_cua.config.base import load
    from slime_cua.config.run import RunConfig
    from slime_cua.convert import read_config
    from slime_cua.core.errors import SlimeCuaError
    from slime_cua.trainer.layouts import layout_faults, legal_layouts

    try:
        config = load(RunConfig, path, overrides)
        model = read_config(config.model)
        table = legal_layouts(model)
    except SlimeCuaError as error:
        yield Finding("config", "cannot be used", str(error))
        return
    parallel = config.trainer.parallel
    for axis in table:
        yield Finding(
            f"layout {axis.name}", f"{getattr(parallel, axis.name)}; legal: {axis.legal} ({axis.reason})"
        )
    for fault in layout_faults(model, parallel, config.model):
        yield Finding("layout", "refused", fault)


def memory_bytes() -> int:
    """Memory of this machine, or of this container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return total


def _disk(run_dir: Path) -> Iterable[Finding]:
    folder = run_dir.resolve()
    while not folder.exists():
        folder = folder.parent
    free_gb = shutil.disk_usage(folder).free / 2**30
    remedy = "" if free_gb >= MIN_DISK_GB else f"free some of {folder}, or set run_dir to another disk"
    yield Finding("disk", f"{free_gb:.0f} GB free for {run_dir}", remedy)
    if not os.access(folder, os.W_OK):
        yield Finding("run_dir", f"{folder} cannot be written", "set run_dir to a folder of yours")


def _limits() -> Iterable[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES
    yield Finding("open files", str(soft), "" if is_enough else f"ulimit -n {MIN_OPEN_FILES}")


def _packages() -> Iterable[Finding]:
    missing = []
    for name in PACKAGES:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    remedy = "bash scripts/env.sh" if missing else ""
    yield Finding("packages", f"lacks {', '.join(missing)}" if missing else "all there", remedy)


def _desktops() -> Iterable[Finding]:
    from sandbox_cluster.providers.preflight import PACKAGES as PROGRAMS
    from sandbox_cluster.providers.preflight import explain, gather
    from slime_cua.config.sandbox import DesktopConfig

    facts = gather(user=DesktopConfig().first_uid if os.geteuid() == 0 else None)
    missing = facts.missing_programs
    fault = explain(facts)
    yield Finding(
        "desktop programs",
        f"lacks {', '.join(missing)}" if missing else ", ".join(PROGRAMS),
        (fault or "") if missing else "",
    )
    if not missing:
        value = "bubblewrap makes a sandbox" if facts.trial_error is None else "no"
        yield Finding("user namespaces", value, fault or "")


def _groups() -> Iterable[Finding]:
    from sandbox_cluster.providers.limits import find_backend

    version = find_backend().version
    value = f"version {version}" if version else "none to make: limits a process, not a desktop"
    remedy = (
        ""
        if version
        else "run as root, or delegate a cgroup: systemd-run --user --scope -p Delegate=yes COMMAND"
    )
    yield Finding("control groups", value, remedy, is_needed=False)


def _ports() -> Iterable[Finding]:
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(2.0)
            client.connect(server.getsockname())
        yield Finding("loopback", "ports can be opened")
    except OSError as error:
        yield Finding("loopback", str(error), "ip link set lo up (in a container: do not use --network=none)")


def _torch() -> Iterable[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", str(error), "bash scripts/env.sh")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Finding("torch", f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")


def _gpus() -> Iterable[Finding]:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
        names = [line.split(" (")[0] for line in done.stdout.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError):
        names = []
    if not names:
        yield Finding("GPU", "none: the same job runs on the CPU, small")
        return
    import torch

    remedy = (
        ""
        if torch.cuda.is_available()
        else "install a CUDA build of torch: remove .venv, then bash scripts/env.sh"
    )
    yield Finding("GPU", f"{len(names)}: {names[0]}", remedy, is_needed=False)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
