"""Run a function on two or more gloo processes and collect what each returns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def run_two_ranks(module: str, function: str, folder: Path, timeout_s: float = 120.0) -> list[Any]:
    """run_ranks with two."""
    return run_ranks(module, function, folder, 2, timeout_s)


def run_ranks(module: str, function: str, folder: Path, world: int, timeout_s: float = 240.0) -> list[Any]:
    """Each rank's result of `function(group)` in `module`, in order; AssertionError with stderr if one fails."""
    code = f"from tests.numerics.two_ranks import main; main({module!r}, {function!r}, {str(folder)!r})"
    processes = []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, env=env, stderr=subprocess.PIPE
            )
        )
    try:
        errors = [process.communicate(timeout=timeout_s)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0, error
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def main(module: str, function: str, folder: str) -> None:
    """Body of one rank."""
    import importlib

    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    result = getattr(importlib.import_module(module), function)(dist.group.WORLD)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
