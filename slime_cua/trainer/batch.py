"""Samples to packed micro-batches.

Legend: T packed tokens, R trained rows, S segments, K action steps of the micro-batch, I distinct images, M image tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch

from slime_cua.core.errors import DataError
from slime_cua.core.types import ImageRef, StepType, TrainSample
from slime_cua.data.expand import expand_image_placeholders
from slime_cua.trainer.images import ImageLoader, ImageSource, PatchConfig, patchify
from slime_cua.trainer.streams import Streams, expand_streams

STEP_TYPES: tuple[str, ...] = get_args(StepType)
"""Index in step_type_K -> name."""


@dataclass(frozen=True)
class Microbatch:
    """One packed forward: segments side by side, attention inside each only."""

    token_ids_T: torch.Tensor
    positions_3T: torch.Tensor
    cu_seqlens: torch.Tensor
    """int32 [S + 1] (one more if padded): where segments begin, and T."""
    max_seqlen: int
    row_R: torch.Tensor
    """The token whose hidden state predicts the trained token: its index - 1."""
    target_R: torch.Tensor
    old_logp_R: torch.Tensor
    segment_R: torch.Tensor
    step_R: torch.Tensor
    """Steps are numbered over the micro-batch."""
    advantage_S: torch.Tensor
    sample_weight_S: torch.Tensor
    step_type_K: torch.Tensor
    """Index into STEP_TYPES."""
    num_tokens: int
    """T without padding."""
    sample_index: tuple[int, ...] = ()
    """Which samples these are, in the list that was packed."""
    patches: torch.Tensor | None = None
    """[patches, features] of the distinct images; None without images."""
    grid_I3: torch.Tensor | None = None
    image_token_M: torch.Tensor | None = None
    """Row of the vision tower's output for each image token of the stream."""

    def to(self, device: torch.device) -> Microbatch:
        """The same on `device`."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


def expanded_lengths(samples: Sequence[TrainSample], config: PatchConfig) -> list[int]:
    """Tokens of each sample with its images expanded."""
    return [
        len(expand_image_placeholders(s.segment.token_ids, s.segment.images, config.tokens)) for s in samples
    ]


def check_samples(samples: Sequence[TrainSample], lengths: Sequence[int], max_tokens: int) -> None:
    """Raise DataError, naming the segment, for one over the token budget or with a trained first token."""
    for sample, length in zip(samples, lengths, strict=True):
        segment = sample.segment
        if length > max_tokens:
            raise DataError(
                f"segment {segment.segment_id} has {length} tokens; max_tokens_per_rank is {max_tokens}: "
                "raise it, or keep fewer screenshots in view"
            )
        if segment.is_trained and segment.is_trained[0]:
            raise DataError(
                f"segment {segment.segment_id}: the first token has no context and cannot be trained"
            )


def build_microbatch(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    source: ImageSource | None,
    loader: ImageLoader,
    pad_multiple: int,
    pad_id: int,
) -> Microbatch:
    """Pack samples[i] for i in indices.

    pad_multiple: T is padded to a multiple of it with one more, untrained sequence (sequence parallel splits T).
    """
    chosen = [samples[i] for i in indices]
    images = [ref for sample in chosen for ref in sample.segment.images]
    streams = _streams(chosen, images, loader.config)
    rows = _rows(chosen, streams)
    num_tokens = len(streams.token_ids_T)
    num_pads = -num_tokens % pad_multiple
    bounds = np.concatenate([[0], np.cumsum(streams.lengths_S), [num_tokens + num_pads] if num_pads else []])
    pads_3T = np.broadcast_to(np.arange(num_pads), (3, num_pads))
    vision = {} if not images else _vision(images, source, loader)
    return Microbatch(
        token_ids_T=_tensor(np.concatenate([streams.token_ids_T, np.full(num_pads, pad_id)]), torch.int64),
        positions_3T=_tensor(np.concatenate([streams.positions_3T, pads_3T], axis=1), torch.int64),
        cu_seqlens=_tensor(bounds, torch.int32),
        max_seqlen=int(np.diff(bounds).max()),
        advantage_S=_tensor([s.advantage for s in chosen], torch.float32),
        sample_weight_S=_tensor([s.sample_weight for s in chosen], torch.float32),
        num_tokens=num_tokens,
        sample_index=tuple(indices),
        **rows,
        **vision,
    )


def _tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.asarray(values))).to(dtype)


def _streams(chosen: Sequence[TrainSample], images: Sequence[ImageRef], config: PatchConfig) -> Streams:
    grids = np.array([config.token_grid(ref.width_px, ref.height_px) for ref in images], dtype=np.int64)
    ids_N = np.concatenate([np.asarray(s.segment.token_ids, dtype=np.int64) for s in chosen])
    lengths_S = np.array([len(s.segment.token_ids) for s in chosen], dtype=np.int64)
    streams = expand_streams(ids_N, lengths_S, grids.reshape(-1, 2), config.tokens.image_token_id)
    expanded = [
        expand_image_placeholders(s.segment.token_ids, s.segment.images, config.tokens) for s in chosen
    ]
    if not np.array_equal(streams.token_ids_T, np.concatenate(expanded)):
        raise AssertionError("the trainer's stream differs from expand_image_placeholders")
    return streams


def _rows(chosen: Sequence[TrainSample], streams: Streams) -> dict[str, torch.Tensor]:
    """Everything that has one entry a trained row, and the type of each step."""
    lengths_S = np.array([len(s.segment.token_ids) for s in chosen])
    trained_N = np.concatenate([np.asarray(s.segment.is_trained, dtype=bool) for s in chosen])
    logp_N = np.concatenate([np.asarray(s.segment.logp, dtype=np.float32) for s in chosen])
    step_N = np.concatenate([np.asarray(s.segment.step_of_token, dtype=np.int64) for s in chosen])
    num_steps_S = np.array([len(s.segment.step_types) for s in chosen])
    first_step_S = np.cumsum(num_steps_S) - num_steps_S
    segment_N = np.repeat(np.arange(len(chosen)), lengths_S)
    at_R = streams.start_N[trained_N]
    types = [STEP_TYPES.index(name) for s in chosen for name in s.segment.step_types]
    return {
        "row_R": _tensor(at_R - 1, torch.int64),
        "target_R": _tensor(streams.token_ids_T[at_R], torch.int64),
        "old_logp_R": _tensor(logp_N[trained_N], torch.float32),
        "segment_R": _tensor(segment_N[trained_N], torch.int64),
        "step_R": _tensor((step_N + first_step_S[segment_N])[trained_N], torch.int64),
        "step_type_K": _tensor(types, torch.int64),
    }


def _vision(
    images: Sequence[ImageRef], source: ImageSource | None, loader: ImageLoader
) -> dict[str, torch.Tensor]:
    """Patches of the distinct images, and where each occurrence finds its rows in the tower's output."""
    if source is None:
        raise DataError(f"{len(images)} images in the batch, but no image store was given")
    distinct = list({ref.sha256: ref for ref in images}.values())
    order = {ref.sha256: index for index, ref in enumerate(distinct)}
    config = loader.config
    patches = [
        patchify(torch.from_numpy(loader.pixels(ref, source).copy())[None], config) for ref in distinct
    ]
    grids = [config.grid_hw(ref.width_px, ref.height_px) for ref in distinct]
    merge = config.tokens.merge_size**2
    counts = np.array([rows * columns // merge for rows, columns in grids])
    first = np.cumsum(counts) - counts
    occurrence = [np.arange(counts[i]) + first[i] for i in (order[ref.sha256] for ref in images)]
    return {
        "patches": torch.cat(patches),
        "grid_I3": _tensor([(1, *grid) for grid in grids], torch.int64),
        "image_token_M": _tensor(np.concatenate(occurrence), torch.int64),
    }
