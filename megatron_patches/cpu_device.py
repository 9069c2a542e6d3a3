"""Symptom: megatron-core and mcore-bridge create tensors on 'cuda', ask torch.cuda for devices, streams and RNG states, and
         read tensor types such as 'torch.cuda.FloatTensor'; without a GPU the first of these raises.
Upstream: megatron-core 0.16.1 and mcore_bridge 1.6.5, throughout.
Why:      the same trainer runs on CPU with gloo. Queries of torch.cuda that would only raise answer for the CPU;
          device arguments are rewritten by a TorchFunctionMode that is active inside `cpu_scope` only, so nothing of
          torch is replaced for others in the process (transformers' rotary tables, data loaders).
Remove when: megatron-core takes its device from its config.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_patches.registry import Patch

CPU = torch.device("cpu")


class CudaMeansCpu(TorchFunctionMode):
    """Inside it, device 'cuda' is the CPU and Tensor.type() spells types as CUDA ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(argument) else argument for argument in args)
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str) and result.startswith("torch."):
            return f"torch.cuda.{result.rpartition('.')[2]}"
        return result


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


class _Event:
    """An event that has always happened."""

    def __init__(self, *ignored: Any, **also_ignored: Any) -> None: ...

    def record(self, *ignored: Any) -> None: ...

    def wait(self, *ignored: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream:
    """The one order in which a CPU works."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *ignored: Any, **also_ignored: Any) -> None: ...

    def wait_stream(self, *ignored: Any) -> None: ...

    def wait_event(self, *ignored: Any) -> None: ...

    def record_event(self, *ignored: Any) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *ignored: Any) -> None: ...


def _answer(value: Any) -> Callable[..., Any]:
    """A new function each time: torch._dynamo refuses one function under two names."""
    return lambda *ignored, **also_ignored: value


def install() -> None:
    """Answer torch.cuda queries for the CPU. jit_fuser is torch.compile: run eagerly, compiling costs minutes here."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    cuda: Any = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, _answer(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, _answer(0))
    cuda.current_device = _answer(CPU)
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream, cuda.default_stream = _answer(_Stream()), _answer(_Stream())
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))


def is_cpu_only() -> bool:
    """True where there is no CUDA device."""
    return not torch.cuda.is_available()


@contextlib.contextmanager
def cpu_scope() -> Iterator[None]:
    """Megatron code runs inside: on a machine without CUDA, 'cuda' means the CPU; elsewhere a no-op. Per thread."""
    if not is_cpu_only():
        yield
        return
    with CudaMeansCpu():
        yield


PATCH = Patch(
    name="cpu_device",
    phase="before_import",
    symptom="no CUDA device; Megatron runs on CPU tensors",
    install=install,
    is_needed=is_cpu_only,
)
