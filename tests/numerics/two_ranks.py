"""Run a function on two or more gloo processes and collect what each returns."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.numerics.warm_ranks import run_together


def run_two_ranks(module: str, function: str, folder: Path) -> list[Any]:
    """run_ranks with two."""
    return run_ranks(module, function, folder, 2)


def run_ranks(module: str, function: str, folder: Path, world: int, timeout_s: float = 240.0) -> list[Any]:
    """Each rank's result of `function(group)` in `module`, in order; AssertionError with the traceback if one fails."""
    run_together(one_rank, [(module, function, folder, rank, world) for rank in range(world)], timeout_s)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def one_rank(module: str, function: str, folder: Path, rank: int, world: int) -> None:
    """Body of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    result = getattr(importlib.import_module(module), function)(dist.group.WORLD)
    torch.save(result, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
