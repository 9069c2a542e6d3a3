"""Symptom: on CPU, megatron's RNG tracker reads a CUDA generator, and all_to_all_single gets its split sizes as tensors,
         which gloo refuses.
Upstream: megatron-core 0.16.1 core/tensor_parallel/random.py, core/tensor_parallel/mappings.py.
Why:      on CPU the default generator is the one in use, and gloo wants Python integers.
Remove when: megatron-core takes its generator from the device of its config.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_patches.cpu_device import is_cpu_only
from megatron_patches.registry import Patch


def install() -> None:
    """Point megatron's RNG state functions at the default generator; integers for all_to_all_single."""
    import megatron.core.tensor_parallel.random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *ignored, **also_ignored: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *ignored, **also_ignored: torch.set_rng_state(state)
    _integer_splits()


def _integer_splits() -> None:
    original = torch.distributed.all_to_all_single

    def all_to_all_single(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_integers(value) for value in args)
        kwargs = {key: _integers(value) if "split" in key else value for key, value in kwargs.items()}
        return original(output, input, *args, **kwargs)

    torch.distributed.all_to_all_single = all_to_all_single


def _integers(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


PATCH = Patch(
    name="cpu_collectives",
    phase="after_import",
    symptom="no CUDA device; RNG tracker and all-to-all use the CPU's",
    install=install,
    is_needed=is_cpu_only,
)
