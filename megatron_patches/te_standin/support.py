"""The small symbols of Transformer Engine: fp8 switches that say off, RNG tracker, checkpoint, split."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def fp8_autocast(enabled: bool = False, **ignored: Any) -> Iterator[None]:
    """A no-op; raises when fp8 is asked for."""
    _refuse_fp8(enabled)
    yield


@contextlib.contextmanager
def fp8_model_init(enabled: bool = False, **ignored: Any) -> Iterator[None]:
    """A no-op; raises when fp8 is asked for."""
    _refuse_fp8(enabled)
    yield


def _refuse_fp8(enabled: bool) -> None:
    if enabled:
        raise NotImplementedError("fp8 needs the real transformer_engine")


@contextlib.contextmanager
def activation_recompute_forward(*ignored: Any, **also_ignored: Any) -> Iterator[None]:
    """Only fp8 scaling state depends on it."""
    yield


class FP8GlobalStateManager:
    """Says that fp8 is off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def is_first_fp8_module() -> bool:
        return False

    @staticmethod
    def reset() -> None: ...


class Recipe:
    """Accepts any recipe arguments; never used while fp8 is off."""

    def __init__(self, *ignored: Any, **also_ignored: Any) -> None: ...


def unavailable(name: str) -> type:
    """A module class that can be imported and subclassed but not built."""

    def refuse(self: Any, *ignored: Any, **also_ignored: Any) -> None:
        raise NotImplementedError(f"{name} needs the real transformer_engine")

    return type(name, (torch.nn.Module,), {"__init__": refuse})


class CudaRNGStatesTracker:
    """Named generator states that a `fork` swaps in; of the default generator of the device in use."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Remember the state that `seed` gives under `name`."""
        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the named state inside the block."""
        before = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(before)


class SplitAlongDim:
    """torch.split under the name of an autograd function."""

    @staticmethod
    def apply(x: torch.Tensor, dim: int, sizes: Any, squeeze: bool = False) -> Any:
        return torch.split(x, list(sizes) if isinstance(sizes, list | tuple) else int(sizes), dim=dim)


def checkpoint(function: Any, *args: Any, distribute_saved_activations: bool = False, **options: Any) -> Any:
    """Megatron's activation checkpoint of `function`."""
    from megatron.core import tensor_parallel

    for name in ("get_rng_state_tracker", "tp_group"):
        options.pop(name, None)
    bound = functools.partial(function, **options) if options else function
    return tensor_parallel.checkpoint(bound, distribute_saved_activations, *args)
