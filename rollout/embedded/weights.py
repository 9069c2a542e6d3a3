"""New weights for a running engine: everything is received and checked first, then put in place at once.

All methods run on the engine's thread, between steps, while no request runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollout.embedded.engine import Engine
from slime_cua.convert.weight_stream import WeightGroup, dtype_of, tensor_digest

_VISION_PREFIX = "model.visual."


class WeightUpdater:
    """The update endpoints' work. Every ValueError names what was wrong, and then no weight has changed."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._groups: dict[str, WeightGroup] = {}
        self._weights: dict[str, Tensor] = dict(engine.model.model.state_dict())
        self._required = _untied_names(self._weights)

    def join_group(
        self, address: str, port: int, rank: int, world_size: int, name: str, backend: str
    ) -> None:
        """Join the sender's broadcast group."""
        if name in self._groups:
            raise ValueError(f"weight update group {name!r} exists already: destroy it first")
        self._groups[name] = WeightGroup.join(address, port, rank, world_size, name, backend, self._timeout_s)

    def leave_group(self, name: str) -> None:
        """Leave a group."""
        group = self._groups.pop(name, None)
        if group is None:
            raise ValueError(f"there is no weight update group {name!r}")
        group.close()

    def receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        version: str | None,
    ) -> None:
        """Receive one bucket from the group. The broadcast is always joined, so that the sender never waits in vain."""
        group = self._groups.get(group_name)
        if group is None:
            raise ValueError(
                f"there is no weight update group {group_name!r}: call /init_weights_update_group"
            )
        if not len(names) == len(dtypes) == len(shapes):
            raise ValueError(
                f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes: must be as many"
            )
        device = self._engine.model.device
        staged = [
            torch.empty(list(shape), dtype=dtype_of(dtype), device=device)
            for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        group.broadcast(staged)
        self._swap(dict(zip(names, staged, strict=True)), version)

    def load(self, folder: Path, version: str | None) -> None:
        """Load a whole checkpoint folder. A missing tensor is an error, too."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{folder} holds no *.safetensors file")
        staged: dict[str, Tensor] = {}
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    staged.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: {error}") from error
        missing = sorted(self._required - staged.keys())
        if missing:
            raise ValueError(f"{folder}: missing tensor {missing[0]}{_and_more(missing)}")
        self._swap(staged, version)

    def digests(self) -> dict[str, str]:
        """Digest of every tensor by its Hugging Face name."""
        return {name: tensor_digest(self._weights[name]) for name in sorted(self._required)}

    def values(self, name: str, count: int) -> list[object]:
        """The first `count` entries along the first axis of a tensor, as nested lists."""
        if name not in self._weights:
            raise ValueError(f"unknown tensor {name}")
        values: list[object] = self._weights[name][:count].float().tolist()
        return values

    def _swap(self, staged: dict[str, Tensor], version: str | None) -> None:
        engine = self._engine
        if engine.num_running:
            raise ValueError(f"{engine.num_running} requests run: pause with mode abort before an update")
        for name, tensor in staged.items():
            known = self._weights.get(name)
            if known is None:
                raise ValueError(f"unknown tensor {name}: this model has no such name; no weight was changed")
            if known.shape != tensor.shape:
                raise ValueError(
                    f"tensor {name} has shape {list(tensor.shape)}, the model's has {list(known.shape)}; "
                    "no weight was changed"
                )
            if not torch.isfinite(tensor).all():
                raise ValueError(f"tensor {name} holds NaN or infinity; no weight was changed")
        is_vision_changed = False
        for name, tensor in staged.items():
            new = tensor.to(self._weights[name])
            if name.startswith(_VISION_PREFIX) and not torch.equal(new, self._weights[name]):
                is_vision_changed = True
            self._weights[name].copy_(new)
        engine.weights_changed(is_vision_changed)
        if version is not None:
            engine.set_version(version)


def with_abort(engine: Engine, abort_all: bool, work: Callable[[], None]) -> Callable[[], None]:
    """`work`, after all requests were aborted if that is asked."""

    def run() -> None:
        if abort_all:
            engine.abort(None, "weights are updated")
        work()

    return run


def _untied_names(weights: dict[str, Tensor]) -> frozenset[str]:
    seen: set[int] = set()
    names = []
    for name, tensor in weights.items():
        if tensor.data_ptr() not in seen:
            names.append(name)
            seen.add(tensor.data_ptr())
    return frozenset(names)


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
