"""`python -m sandbox_cluster.host --gateway URL --provider local --slots N --screen 640x384`: one desktop machine's agent."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from sandbox_cluster.entry import add_body_option, add_parent_options, run_service

HOST_TOKENS = "SLIME_CUA_HOST_TOKENS"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sandbox_cluster.host", description=__doc__)
    parser.add_argument(
        "--gateway",
        required=True,
        help="URL of the gateway; the host token is taken from SLIME_CUA_HOST_TOKENS",
    )
    parser.add_argument(
        "--provider",
        default="local",
        help="local, docker, qemu, remote, fake, or module:Class; the settings of docker, qemu and remote come by --config",
    )
    parser.add_argument("--slots", type=int, default=4, help="desktops leased at once")
    parser.add_argument("--spares", type=int, default=1, help="warm desktops beside them")
    parser.add_argument("--max-boots", type=int, default=2, help="desktops booting at once")
    parser.add_argument("--screen", default="1504x832", help="WIDTHxHEIGHT in pixels")
    parser.add_argument(
        "--config", type=Path, help="JSON of a SandboxConfig; the flags above are taken from it then"
    )
    parser.add_argument("--host-id", default="", help="name of this agent; default: the machine's name")
    parser.add_argument("--tags", default="", help="comma-separated; requirements may ask for them")
    parser.add_argument(
        "--state", type=Path, help="folder for what must outlive a crash; default: under /var/tmp"
    )
    parser.add_argument("--listen", default="127.0.0.1", help="address for the gateway's calls")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument(
        "--advertise",
        default="",
        help="URL at which the gateway reaches this agent; default: http://LISTEN:PORT",
    )
    parser.add_argument(
        "--allow-url",
        action="append",
        default=[],
        help="beginning of URLs that download steps may fetch; repeatable",
    )
    parser.add_argument(
        "--drain-timeout-s", type=float, default=30.0, help="after SIGTERM leases get so long to end"
    )
    add_body_option(parser)
    add_parent_options(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)

    async def serve() -> None:
        from sandbox_cluster.host.service import run

        await run(options, os.environ.get(HOST_TOKENS, ""))

    return run_service("sandbox host", serve)


if __name__ == "__main__":
    sys.exit(main())
