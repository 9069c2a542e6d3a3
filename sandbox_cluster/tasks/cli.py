"""`slime-cua tasks check PATH...`: do the tasks load, and does their initial state score exactly 0?"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox_cluster.client import SandboxClient
    from sandbox_cluster.tasks.check import Finding
    from slime_cua.core.types import Task


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime-cua tasks", description=__doc__)
    parser.add_argument("command", choices=["check", "list"], help="check on desktops, or only load and list")
    parser.add_argument("paths", nargs="+", type=Path, help="task files and folders")
    parser.add_argument(
        "--gateway",
        default="",
        help="URL of a running gateway (token in SLIME_CUA_GATEWAY_TOKEN); without it one is started",
    )
    parser.add_argument("--provider", default="local")
    parser.add_argument("--screen", default="640x384", help="WIDTHxHEIGHT in pixels")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--limit", type=int, default=0, help="check only so many tasks; 0: all")
    parser.add_argument(
        "--report",
        type=Path,
        help="JSON lines, one a task as it ends; what stands there is not checked again",
    )
    parser.add_argument(
        "--allow-url",
        action="append",
        default=[],
        help="beginning of URLs that download steps may fetch on the desktops started here; repeatable",
    )
    parser.add_argument("--quarantine", type=Path, help="write the ids of bad tasks and why, as JSON lines")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    from slime_cua.core.errors import SlimeCuaError

    try:
        return asyncio.run(_run(options))
    except SlimeCuaError as error:
        print(f"tasks {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


async def _run(options: argparse.Namespace) -> int:
    from sandbox_cluster.client import SandboxClient
    from sandbox_cluster.cluster import LocalCluster
    from sandbox_cluster.host.service import screen_of
    from sandbox_cluster.tasks.check import Finding
    from sandbox_cluster.tasks.loader import load_tasks
    from slime_cua.config.base import validate
    from slime_cua.config.sandbox import SandboxConfig

    if options.command == "list":
        tasks = load_tasks(options.paths)
        for task in tasks[: options.limit or None]:
            print(f"{task.id}\t{task.family}\t{task.instruction}")
        return 0
    broken: list[Finding] = []
    tasks = load_tasks(
        options.paths, on_bad=lambda name, error: broken.append(Finding(name, "", "bad", str(error)))
    )
    tasks = tasks[: options.limit or None]
    for finding in broken:
        print(f"{finding.state:9} {finding.task_id} {finding.reason}", flush=True)
    if not tasks:
        return _conclude(broken, len(broken), options)
    plain = {
        "provider": options.provider,
        "num_desktops": options.parallel,
        "screen_wh_px": screen_of(options.screen),
        "maximise": True,
    }
    config = validate(SandboxConfig, plain, "command line")
    if options.gateway:
        async with SandboxClient(
            options.gateway, os.environ.get("SLIME_CUA_GATEWAY_TOKEN", ""), config
        ) as client:
            return await _check(client, tasks, broken, options)
    with tempfile.TemporaryDirectory(prefix="slime-cua-check-") as folder:
        allowed = tuple(word for url in options.allow_url for word in ("--allow-url", url))
        async with LocalCluster(config, Path(folder), host_arguments=allowed) as cluster:
            async with SandboxClient(cluster.url, cluster.token, config) as client:
                return await _check(client, tasks, broken, options)


async def _check(
    client: SandboxClient, tasks: Sequence[Task], broken: Sequence[Finding], options: argparse.Namespace
) -> int:
    """`broken`: findings of tasks that do not load."""
    from sandbox_cluster.tasks.check import append_report, check_tasks, digest_of, read_report

    known = read_report(options.report) if options.report else {}
    findings = [known[key] for task in tasks if (key := (task.id, digest_of(task))) in known]
    left = [task for task in tasks if (task.id, digest_of(task)) not in known]
    if findings:
        print(f"{len(findings)} of {len(tasks)} tasks stand in {options.report}")
    prefix = f"check-{secrets.token_hex(4)}"
    async for finding in check_tasks(client, left, num_parallel=options.parallel, key=prefix):
        findings.append(finding)
        if options.report:
            append_report(options.report, finding)
        place = f"[{len(findings)}/{len(tasks)}]"
        print(
            f"{place} {finding.state:9} {finding.task_id} {finding.seconds:.1f} s {finding.reason}",
            flush=True,
        )
    return _conclude([*broken, *findings], len(broken) + len(tasks), options)


def _conclude(findings: Sequence[Finding], num_tasks: int, options: argparse.Namespace) -> int:
    """Write the quarantine and the last lines; the exit code."""
    from slime_cua.core.files import write_atomic

    bad = [finding for finding in findings if finding.state == "bad"]
    if options.quarantine:
        lines = [json.dumps({"task_id": one.task_id, "reason": one.reason}) + "\n" for one in bad]
        write_atomic(options.quarantine, "".join(lines).encode())
    num_good = sum(finding.is_good for finding in findings)
    print(f"{num_good} of {num_tasks} tasks score exactly 0 before the first action, {len(bad)} are bad")
    if num_good + len(bad) < num_tasks:
        print("the others could not be checked, for the reasons above; run the same command again")
    return 0 if num_good == num_tasks else 1
