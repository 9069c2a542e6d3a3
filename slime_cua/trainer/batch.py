"""A packed micro-batch on the device: what the model reads.

Legend: T packed tokens, R trained rows, I images, M image tokens of the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
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
    """[patches, features] of the images that the tower must see; None without any image, [0, ...] when all are known."""
    grid_I3: torch.Tensor | None = None
    """(1, rows, columns) of patches of each of them."""
    patch_counts: tuple[int, ...] = ()
    """Patches of each of them, on the host; empty: every tensor-parallel rank computes all."""
    image_names: tuple[str, ...] = ()
    """Distinct images of the stream in order of their features, those already known included; empty: as in `patches`."""
    image_token_M: torch.Tensor | None = None
    """Row of the features for each image token of the stream; None: they are already in order."""
    packed: PackedBatch | None = None
    """Where it came from: the experts recorded for its tokens; None: nothing is known of them."""

    def to(self, device: torch.device) -> Microbatch:
        """The same on `device`."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = value.to(device, non_blocking=True)
        return Microbatch(**values)


def build_microbatch(
    packed: PackedBatch,
    source: ImageSource | None,
    loader: ImageLoader,
    is_known: Callable[[str], bool] = lambda name: False,
    device: torch.device | None = None,
) -> Microbatch:
    """A packed batch on `device` (None: the CPU). Each distinct image is decoded once, and not at all if `is_known` by its
    hash; its pixels travel as uint8 and become patches on the device.
    """
    config = loader.config
    grids = [config.token_grid(ref.width_px, ref.height_px) for ref in packed.images_I]
    positions_3T = packed_positions(
        packed.input_ids_T,
        packed.cu_seqlens,
        np.array(grids, dtype=np.int64).reshape(-1, 2),
        config.tokens.image_token_id,
    )
    row_R = np.flatnonzero(packed.is_trained_T)
    text = Microbatch(
        token_ids_T=torch.from_numpy(packed.input_ids_T),
        positions_3T=torch.from_numpy(positions_3T),
        cu_seqlens=torch.from_numpy(packed.cu_seqlens.astype(np.int32)),
        max_seqlen=packed.max_seqlen,
        row_R=torch.from_numpy(row_R),
        target_R=torch.from_numpy(packed.target_T[row_R]),
        packed=packed,
    )
    text = text if device is None else text.to(device)
    if not packed.distinct_images:
        return text
    if source is None:
        raise DataError(f"{len(packed.distinct_images)} images in the batch, but no image store was given")
    fresh = [ref for ref in packed.distinct_images if not is_known(ref.sha256)]
    return _with_images(text, packed, fresh, source, loader)


def _with_images(
    text: Microbatch, packed: PackedBatch, fresh: list[ImageRef], source: ImageSource, loader: ImageLoader
) -> Microbatch:
    """`text` with the patches of `fresh`, and where each occurrence of an image finds its features."""
    config = loader.config
    device = text.token_ids_T.device
    pixels = (torch.tensor(loader.pixels(ref, source), device=device) for ref in fresh)
    patches = [patchify(image[None], config) for image in pixels]
    grids = [config.grid_hw(ref.width_px, ref.height_px) for ref in fresh]
    sizes = [config.grid_hw(ref.width_px, ref.height_px) for ref in packed.distinct_images]
    counts = np.array([rows * columns // config.tokens.merge_size**2 for rows, columns in sizes])
    first = np.cumsum(counts) - counts
    occurrences = [np.arange(counts[i]) + first[i] for i in packed.image_index_I]
    return replace(
        text,
        patches=torch.cat(patches) if patches else torch.zeros(0, config.num_features, device=device),
        grid_I3=torch.tensor([(1, *grid) for grid in grids], dtype=torch.int64, device=device).reshape(-1, 3),
        patch_counts=tuple(rows * columns for rows, columns in grids),
        image_names=tuple(ref.sha256 for ref in packed.distinct_images),
        image_token_M=torch.from_numpy(np.concatenate(occurrences)).to(device),
    )
