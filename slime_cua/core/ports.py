"""Ports for a rendezvous: one process chooses, others connect a moment later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_240
_EPHEMERAL_LOW = 32_768
_TRIES = 200


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that is free now, below the range from which the kernel gives ports to clients.

    Inside that range a client that tries again and again before the server listens can be given the very port it tries to
    reach, and is then connected to itself: the server cannot bind, and both wait for ever.
    """
    chosen = random.SystemRandom()
    for _ in range(_TRIES):
        port = chosen.randrange(_LOWEST, max(_LOWEST + 1, _first_ephemeral()))
        if _is_free(host, port):
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _EPHEMERAL_LOW
