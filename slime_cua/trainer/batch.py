"""A packed micro-batch on the device: what the model reads.

Legend: T packed tokens, R trained rows, I images, M image tokens of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from slime_cua.core.errors import DataError
from slime_cua.core.types import ImageRef
from slime_cua.data.batch import PackedBatch
from slime_cua.trainer.images import ImageLoader, ImageSource, patchify
from slime_cua.trainer.streams import packed_positions


@dataclass(frozen=True)
class Microbatch:
    """One packed forward: sequences side by side, attention inside each only."""

    token_ids_T: torch.Tensor
    positions_3T: torch.Tensor
    cu_seqlens: torch.Tensor
    """int32: where sequences begin, and T."""
    max_seqlen: int
    row_R: torch.Tensor
    """Rows whose hidden state predicts a trained token."""
    target_R: torch.Tensor
    """The trained tokens."""
    patches: torch.Tensor | None = None
    """[patches, features] of the images the tower sees; None without images."""
    grid_I3: torch.Tensor | None = None
    """(1, rows, columns) of patches of each image the tower sees."""
    image_token_M: torch.Tensor | None = None
    """Row of the tower's output for each image token of the stream; None: they are already in order."""

    def to(self, device: torch.device) -> Microbatch:
        """The same on `device`."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = value.to(device, non_blocking=True)
        return Microbatch(**values)


def build_microbatch(packed: PackedBatch, source: ImageSource | None, loader: ImageLoader) -> Microbatch:
    """The CPU tensors of a packed batch; each distinct image is decoded once."""
    config = loader.config
    grids = [config.token_grid(ref.width_px, ref.height_px) for ref in packed.images_I]
    positions_3T = packed_positions(
        packed.input_ids_T,
        packed.cu_seqlens,
        np.array(grids, dtype=np.int64).reshape(-1, 2),
        config.tokens.image_token_id,
    )
    row_R = np.flatnonzero(packed.is_trained_T)
    vision = _vision(packed.distinct_images, packed.image_index_I, source, loader)
    return Microbatch(
        token_ids_T=torch.from_numpy(packed.input_ids_T),
        positions_3T=torch.from_numpy(positions_3T),
        cu_seqlens=torch.from_numpy(packed.cu_seqlens.astype(np.int32)),
        max_seqlen=packed.max_seqlen,
        row_R=torch.from_numpy(row_R),
        target_R=torch.from_numpy(packed.target_T[row_R]),
        patches=vision.get("patches"),
        grid_I3=vision.get("grid_I3"),
        image_token_M=vision.get("image_token_M"),
    )


def _vision(
    distinct: Sequence[ImageRef], index_I: np.ndarray, source: ImageSource | None, loader: ImageLoader
) -> dict[str, torch.Tensor]:
    """Patches of the distinct images, and where each occurrence finds its rows in the tower's output."""
    if not distinct:
        return {}
    if source is None:
        raise DataError(f"{len(distinct)} images in the batch, but no image store was given")
    config = loader.config
    patches = [patchify(torch.tensor(loader.pixels(ref, source))[None], config) for ref in distinct]
    grids = [config.grid_hw(ref.width_px, ref.height_px) for ref in distinct]
    counts = np.array([rows * columns // config.tokens.merge_size**2 for rows, columns in grids])
    first = np.cumsum(counts) - counts
    occurrences = [np.arange(counts[i]) + first[i] for i in index_I]
    return {
        "patches": torch.cat(patches),
        "grid_I3": torch.tensor([(1, *grid) for grid in grids], dtype=torch.int64),
        "image_token_M": torch.from_numpy(np.concatenate(occurrences)),
    }
