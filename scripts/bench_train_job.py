"""Which process of how many a training benchmark is, and where they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime_cua.core.ports import free_port


@dataclass(frozen=True)
class Job:
    """This process among those of the benchmark."""

    rank: int
    world_size: int
    address: str
    port: int


def this_job(environment: Mapping[str, str]) -> Job:
    """As torchrun says; without it one process that meets itself at a free port."""
    world_size = int(environment.get("WORLD_SIZE", 1))
    if world_size > 1 and "MASTER_PORT" not in environment:
        raise SystemExit(f"WORLD_SIZE = {world_size} without MASTER_PORT: start the processes with torchrun")
    # The launcher's store listens on MASTER_PORT itself.
    port = int(environment["MASTER_PORT"]) + 1 if "MASTER_PORT" in environment else free_port()
    return Job(int(environment.get("RANK", 0)), world_size, environment.get("MASTER_ADDR", "127.0.0.1"), port)
