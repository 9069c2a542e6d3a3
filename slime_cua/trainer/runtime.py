"""Process groups, devices and seeds of a trainer rank."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

import megatron_patches
from slime_cua.config.trainer import ParallelConfig, TrainerConfig
from slime_cua.core.errors import ConfigError, DataError
from slime_cua.trainer.layouts import axis_faults


@dataclass(frozen=True)
class Layout:
    """Where this rank stands."""

    rank: int
    world_size: int
    tp_rank: int
    dp_rank: int
    dp_size: int
    device: torch.device


def check_layout(parallel: ParallelConfig, world_size: int) -> None:
    """Raise ConfigError for a layout that this build cannot run, with the reason."""
    if parallel.world_size != world_size:
        raise ConfigError(
            f"trainer.parallel: tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp} x dp {parallel.dp} = "
            f"{parallel.world_size} ranks, but {world_size} were started"
        )
    faults = axis_faults(parallel)
    if faults:
        raise ConfigError(faults[0])


def start(config: TrainerConfig, rank: int, world_size: int, address: str, port: int, seed: int) -> Layout:
    """Join the job: patches, process group (NCCL with CUDA, gloo without), Megatron's groups, seeds."""
    parallel = config.parallel
    check_layout(parallel, world_size)
    device = _device(rank)
    torch.set_num_threads(config.num_threads)
    megatron_patches.apply()
    timeout = datetime.timedelta(seconds=config.timeout_s)
    # Not by init_method: under torchrun every rank would then wait for a store at this port that none of them opens.
    store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    from megatron.core import mpu, tensor_parallel

    with megatron_patches.cpu_scope():
        mpu.initialize_model_parallel(
            parallel.tp,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=1 if parallel.ep > 1 else None,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Layout(
        rank=rank,
        world_size=world_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        device=device,
    )


def stop() -> None:
    """Leave the process group; this process may then start again under another layout."""
    from mcore_bridge.bridge import gpt_bridge
    from megatron.core import mpu

    if dist.is_initialized():
        gpt_bridge.EP_PP_GROUP = None  # cached for the process; the next layout needs its own
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def _device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count()))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def gather_dicts(mine: dict[int, list[float]], layout: Layout) -> dict[int, list[float]]:
    """The union over data-parallel ranks; each index belongs to one rank. A collective."""
    if layout.dp_size == 1:
        return mine
    found: list[dict[int, list[float]]] = [{} for _ in range(layout.dp_size)]
    dist.all_gather_object(found, mine, group=_dp_group())
    return {index: values for part in found for index, values in part.items()}


def add_dicts(mine: dict[str, float], layout: Layout) -> dict[str, float]:
    """Sums by name over data-parallel ranks; a rank may lack names. A collective."""
    if layout.dp_size == 1:
        return mine
    found: list[dict[str, float]] = [{} for _ in range(layout.dp_size)]
    dist.all_gather_object(found, mine, group=_dp_group())
    names = dict.fromkeys(name for part in found for name in part)
    return {name: sum(part.get(name, 0.0) for part in found) for name in names}


def raise_together(fault: DataError | None, layout: Layout) -> None:
    """Raise the fault of the first data-parallel rank that has one, on all of them. A collective."""
    found: list[str | None] = [None if fault is None else str(fault)]
    if layout.dp_size > 1:
        found = [None] * layout.dp_size
        dist.all_gather_object(found, None if fault is None else str(fault), group=_dp_group())
    for message in found:
        if message is not None:
            raise DataError(message) from fault


def _dp_group() -> dist.ProcessGroup:
    from megatron.core import mpu

    return mpu.get_data_parallel_group()
