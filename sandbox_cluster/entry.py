"""What the command lines of gateway and host share. Imports little: `--help` answers at once."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable

DEFAULT_MAX_BODY_MB = 512
"""As in config.sandbox.SandboxConfig."""


def add_body_option(parser: argparse.ArgumentParser) -> None:
    """The limit that gateway and hosts share."""
    parser.add_argument(
        "--max-body-mb",
        type=int,
        default=DEFAULT_MAX_BODY_MB,
        help="largest body of a call on a lease, uploads included, in MiB; the config's sandbox.max_body_mb",
    )


def add_parent_options(parser: argparse.ArgumentParser) -> None:
    """How a process that starts the service hears that it is ready, and takes it along when it ends."""
    parser.add_argument(
        "--ready-fd", type=int, help='file descriptor that gets {"port": N} when the service is ready'
    )
    parser.add_argument("--tied-to-stdin", action="store_true", help="end when stdin ends")


def run_service(name: str, serve: Callable[[], Awaitable[None]]) -> int:
    """Run it to its end: the exit code. What is wrong is one sentence on stderr, after `name`."""
    from sandbox_cluster.serving import setup_logs
    from slime_cua.core.errors import SlimeCuaError

    async def run() -> None:
        await serve()

    setup_logs()
    try:
        asyncio.run(run())
    except SlimeCuaError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
