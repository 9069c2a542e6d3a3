"""`python -m sandbox_cluster.gateway --port 8700 --state DIR`: the cluster's one port."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

from sandbox_cluster.entry import add_body_option, add_parent_options, run_service

CLIENT_TOKENS = "SLIME_CUA_CLIENT_TOKENS"
HOST_TOKENS = "SLIME_CUA_HOST_TOKENS"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sandbox_cluster.gateway", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8700, help="0: any free port")
    parser.add_argument(
        "--listen-fd", type=int, help="a listening socket to use instead of --host and --port"
    )
    parser.add_argument("--state", type=Path, required=True, help="folder of the SQLite state, mode 0700")
    parser.add_argument(
        "--tokens",
        type=Path,
        help=f'JSON file {{"clients": {{name: token}}, "hosts": {{name: token}}}}; without it: {CLIENT_TOKENS} and {HOST_TOKENS} as name:token,name:token',
    )
    parser.add_argument(
        "--host-timeout-s", type=float, default=10.0, help="a host silent for so long is lost"
    )
    add_body_option(parser)
    add_parent_options(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return run_service("sandbox gateway", lambda: _run(options))


async def _run(options: argparse.Namespace) -> None:
    from sandbox_cluster.gateway.app import create_app
    from sandbox_cluster.gateway.state import State
    from sandbox_cluster.serving import Tokens, bind, event, parse_tokens, read_token_file, serve
    from slime_cua.core.errors import PreflightError

    if options.tokens:
        clients, hosts = read_token_file(options.tokens)
    else:
        clients = parse_tokens(os.environ.get(CLIENT_TOKENS, ""), CLIENT_TOKENS)
        hosts = parse_tokens(os.environ.get(HOST_TOKENS, ""), HOST_TOKENS)
        if set(clients.values()) & set(hosts.values()):
            raise PreflightError(
                f"{CLIENT_TOKENS} and {HOST_TOKENS} share a token: a client could pass for a host; give each its own"
            )
    if options.listen_fd is not None:
        sock = socket.socket(fileno=options.listen_fd)
    else:
        sock = bind(options.host, options.port)
    try:
        app = create_app(
            State(options.state),
            Tokens(clients),
            Tokens(hosts),
            host_timeout_s=options.host_timeout_s,
            max_body_mb=options.max_body_mb,
        )
        event("gateway_starts", address="{}:{}".format(*sock.getsockname()[:2]), state=str(options.state))
        await serve(app, sock, ready_fd=options.ready_fd, is_tied_to_stdin=options.tied_to_stdin)
    finally:
        sock.close()


if __name__ == "__main__":
    sys.exit(main())
