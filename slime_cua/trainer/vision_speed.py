"""The same vision tower with less overhead: patch embedding as a matrix product, positions kept for known grids.

transformers computes the positions of each image in a Python loop and embeds patches by a 3-D convolution whose kernel is
the patch; both cost more than the tower itself when the model is small or the images are many.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F

MAX_LAYOUTS = 32
"""How many lists of grids are kept."""


def speed_up_tower(tower: torch.nn.Module) -> Positions | None:
    """Speed up a Qwen3-VL or Qwen3.5 vision tower in place; None, and nothing done, for any other.

    Outputs and gradients stay those of the tower up to rounding; parameters and their names do not change. Gives what hands
    the tower its positions: a caller that goes around the tower's hooks asks it itself.
    """
    projection = getattr(getattr(tower, "patch_embed", None), "proj", None)
    if not isinstance(projection, torch.nn.Conv3d) or not hasattr(tower, "interpolation_mode"):
        return None
    if projection.kernel_size != projection.stride:
        return None
    projection.forward = _MatrixProduct(projection)  # type: ignore[method-assign, assignment]
    positions = Positions(tower)
    positions.handle = tower.register_forward_pre_hook(positions, with_kwargs=True)
    return positions


class _MatrixProduct:
    """conv3d whose input is one kernel in size: a linear map of the flattened patch."""

    def __init__(self, projection: torch.nn.Conv3d) -> None:
        self._projection = projection

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        weight = self._projection.weight
        y = F.linear(patches.flatten(1), weight.flatten(1), self._projection.bias)
        return y[:, :, None, None, None]


class Positions:
    """Hands the tower its position tensors, computed once for each list of grids."""

    handle: Any = None
    """Removes the hook that makes the tower's own calls use them."""

    def __init__(self, tower: Any) -> None:
        self._options = {
            "num_grid_per_side": tower.num_grid_per_side,
            "mode": tower.interpolation_mode,
            "align_corners": tower.interpolation_align_corners,
            "spatial_merge_size": tower.config.spatial_merge_size,
        }
        self._known: OrderedDict[tuple[Any, ...], dict[str, Any]] = OrderedDict()

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grids = kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]
        return args, {**kwargs, **self.of(grids)}

    def of(self, grids: torch.Tensor) -> dict[str, Any]:
        """Keyword arguments of the tower's forward for images of these grids [I, 3]."""
        key = (str(grids.device), tuple(grids.flatten().tolist()))
        found = self._known.pop(key, None)
        if found is None:
            found = self._compute(grids)
        self._known[key] = found
        while len(self._known) > MAX_LAYOUTS:
            self._known.popitem(last=False)
        return found

    def _compute(self, grids: torch.Tensor) -> dict[str, Any]:
        from transformers.vision_utils import (
            get_vision_cu_seqlens,
            get_vision_interpolation_indices_and_weights,
            get_vision_position_ids,
        )

        distinct = {tuple(grid): grids[i : i + 1] for i, grid in enumerate(grids.tolist())}
        ids = {
            g: get_vision_position_ids(one, self._options["spatial_merge_size"])
            for g, one in distinct.items()
        }
        indices, weights = get_vision_interpolation_indices_and_weights(grids, **self._options)
        bounds = get_vision_cu_seqlens(grids)
        return {
            "position_ids": torch.cat([ids[tuple(grid)] for grid in grids.tolist()]),
            "interp_indices": indices,
            "interp_weights": weights,
            "cu_seqlens": bounds,
            "max_seqlen": int((bounds[1:] - bounds[:-1]).max()),
        }
