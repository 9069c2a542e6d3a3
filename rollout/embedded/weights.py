"""New weights for a running engine: everything is received and checked first, then put in place at once.

All methods run on the engine's thread, between steps, while no request runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rollout.embedded.engine import Engine
from rollout.embedded.names import IGNORED_PREFIX, checkpoint_names, find_tensor
from slime_cua.convert.weight_stream import WeightGroup, dtype_of, tensor_digest

_VISION_PREFIX = "model.visual."


class WeightUpdater:
    """The update endpoints' work. Every ValueError names what was wrong, and then no weight has changed."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._groups: dict[str, WeightGroup] = {}
        self._weights: dict[str, Tensor] = dict(engine.model.model.state_dict())
        self._required = {name: self._tensor(name) for name in checkpoint_names(engine.model.folder)}

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
        staged: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                staged.update(load_file(path))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: {error}") from error
        if not staged:
            raise ValueError(f"{folder} holds no *.safetensors file with tensors")
        missing = sorted(self._required.keys() - staged.keys())
        if missing:
            raise ValueError(f"{folder}: missing tensor {missing[0]}{_and_more(missing)}")
        self._swap(staged, version)

    def digests(self) -> dict[str, str]:
        """Digest of every tensor by its Hugging Face name."""
        return {name: tensor_digest(tensor) for name, tensor in self._required.items()}

    def values(self, name: str, count: int) -> list[object]:
        """The first `count` entries along the first axis of a tensor, as nested lists."""
        values: list[object] = self._tensor(name)[:count].float().tolist()
        return values

    def _tensor(self, name: str) -> Tensor:
        tensor = find_tensor(name, self._weights)
        if tensor is None:
            raise ValueError(f"unknown tensor {name}: this model has no such name; no weight was changed")
        return tensor

    def _swap(self, staged: dict[str, Tensor], version: str | None) -> None:
        engine = self._engine
        if engine.num_running:
            raise ValueError(f"{engine.num_running} requests run: pause with mode abort before an update")
        pairs = []
        for name, tensor in staged.items():
            if name.startswith(IGNORED_PREFIX):
                continue
            known = self._tensor(name)
            if known.shape != tensor.shape:
                raise ValueError(
                    f"tensor {name} has shape {list(tensor.shape)}, the model's has {list(known.shape)}; "
                    "no weight was changed"
                )
            if not torch.isfinite(tensor).all():
                raise ValueError(f"tensor {name} holds NaN or infinity; no weight was changed")
            pairs.append((name, known, tensor.to(known)))
        is_vision_changed = any(
            name.startswith(_VISION_PREFIX) and not torch.equal(known, new) for name, known, new in pairs
        )
        for _, known, new in pairs:
            known.copy_(new)
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


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
