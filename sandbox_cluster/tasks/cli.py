"""`slime-cua tasks check PATH...`: do the tasks load, and does their initial state score exactly 0?"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path


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
    from sandbox_cluster.tasks.loader import load_tasks
    from slime_cua.config.base import validate
    from slime_cua.config.sandbox import SandboxConfig

    tasks = load_tasks(options.paths)
    tasks = tasks[: options.limit] if options.limit else tasks
    if options.command == "list":
        for task in tasks:
            print(f"{task.id}\t{task.family}\t{task.instruction}")
        return 0
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
            return await _check(client, tasks, options)
    with tempfile.TemporaryDirectory(prefix="slime-cua-check-") as folder:
        async with LocalCluster(config, Path(folder)) as cluster:
            async with SandboxClient(cluster.url, cluster.token, config) as client:
                return await _check(client, tasks, options)


async def _check(client: object, tasks: list, options: argparse.Namespace) -> int:  # type: ignore[type-arg]
    from sandbox_cluster.client import SandboxClient
    from sandbox_cluster.tasks.check import check_tasks
    from slime_cua.core.files import write_atomic

    assert isinstance(client, SandboxClient)
    bad = []
    async for finding in check_tasks(client, tasks, num_parallel=options.parallel):
        if not finding.is_good:
            bad.append({"task_id": finding.task_id, "reason": finding.reason})
            print(f"BAD  {finding.task_id}: {finding.reason}")
    if options.quarantine:
        write_atomic(options.quarantine, "".join(json.dumps(one) + "\n" for one in bad).encode())
    print(f"{len(tasks) - len(bad)} of {len(tasks)} tasks score exactly 0 before the first action")
    return 1 if bad else 0
