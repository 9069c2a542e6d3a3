"""Where a checkpoint's tensors live in the loaded model.

transformers keeps the experts of a mixture in two fused tensors and reads checkpoints that have them one by one; new weights
come under the checkpoint's names, so those are views into the fused ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slime_cua.core.errors import CheckpointError

IGNORED_PREFIX = "mtp."
"""Multi-token prediction: in checkpoints, not in the model that serves."""


def checkpoint_names(folder: Path) -> list[str]:
    """Names in the *.safetensors files of `folder`, without the ignored ones. Raises CheckpointError without any file."""
    names: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                names.extend(name for name in file.keys() if not name.startswith(IGNORED_PREFIX))  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from error
    if not names:
        raise CheckpointError(f"{folder} holds no *.safetensors file with tensors")
    return sorted(names)


def find_tensor(name: str, weights: Mapping[str, Tensor]) -> Tensor | None:
    """The model's tensor, or view, that `name` of a checkpoint stands for; None when there is none.

    Example: "x.experts.3.up_proj.weight" is the lower half of "x.experts.gate_up_proj"[3].
    """
    if name in weights:
        return weights[name]
    head, found, tail = name.partition(".experts.")
    index, _, kind = tail.partition(".")
    if not found or not index.isdecimal():
        return None
    fused = weights.get(f"{head}.experts.{'down_proj' if kind == 'down_proj.weight' else 'gate_up_proj'}")
    if fused is None or int(index) >= len(fused):
        return None
    expert = fused[int(index)]
    half = len(expert) // 2
    parts = {"down_proj.weight": expert, "gate_proj.weight": expert[:half], "up_proj.weight": expert[half:]}
    return parts.get(kind)
