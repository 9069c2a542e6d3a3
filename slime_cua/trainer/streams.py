"""From source tokens (one placeholder an image) to the streams a model computes with, for many samples at once.

Legend: N source tokens over all samples, T expanded tokens, S samples, I images.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slime_cua.core.errors import DataError

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Streams:
    """Expanded samples, one after the other."""

    token_ids_T: Ints
    positions_3T: Ints
    """Multimodal rotary positions (time, row, column); each sample starts at 0."""
    start_N: Ints
    """Where each source token begins in the expanded stream."""
    lengths_S: Ints
    """Expanded tokens of each sample."""


def expand_streams(token_ids_N: Ints, lengths_S: Ints, grid_I2: Ints, image_token_id: int) -> Streams:
    """Expanded ids and rotary positions.

    token_ids_N: samples concatenated; lengths_S: source tokens of each. grid_I2: (rows, columns) of image tokens, in the
    order of the placeholders over all samples.

        text token:   position of the token before + 1, on all three axes
        image token:  (p, p + row, p + column); the next token is at p + max(rows, columns)

    Example: [5, <image>, 6] with a 2x3 image: 8 tokens; columns of positions: 000, 111, 112, 113, 121, 122, 123, 444.
    Raises DataError when placeholders and images differ in number.
    Source: get_rope_index of transformers' Qwen3-VL and Qwen3.5 (the rule; images only).
    """
    is_image_N = token_ids_N == image_token_id
    if int(is_image_N.sum()) != len(grid_I2):
        raise DataError(f"{int(is_image_N.sum())} image placeholders for {len(grid_I2)} images")
    count_N, advance_N = np.ones_like(token_ids_N), np.ones_like(token_ids_N)
    columns_N = np.ones_like(token_ids_N)
    count_N[is_image_N] = grid_I2[:, 0] * grid_I2[:, 1]
    advance_N[is_image_N] = grid_I2.max(axis=1) if len(grid_I2) else 0
    columns_N[is_image_N] = grid_I2[:, 1]
    start_N = _before(count_N)
    first_N = _starts(lengths_S)
    position_N = _before(advance_N)
    position_N -= np.repeat(position_N[first_N], lengths_S) if len(token_ids_N) else 0
    source_T = np.repeat(np.arange(len(token_ids_N)), count_N)
    inside_T = np.arange(len(source_T)) - start_N[source_T]
    row_T, column_T = np.divmod(inside_T, columns_N[source_T])
    base_T = position_N[source_T]
    return Streams(
        token_ids_T=token_ids_N[source_T],
        positions_3T=np.stack([base_T, base_T + row_T, base_T + column_T]),
        start_N=start_N,
        lengths_S=np.add.reduceat(count_N, first_N) if len(lengths_S) else lengths_S,
    )


def _before(steps: Ints) -> Ints:
    """Sum of all entries before each."""
    return np.cumsum(steps) - steps


def _starts(lengths_S: Ints) -> Ints:
    if len(lengths_S) and lengths_S.min() < 1:
        raise DataError("a sample without tokens cannot be trained")
    return _before(lengths_S)


def packed_positions(ids_T: Ints, cu_seqlens: NDArray[np.int32], grid_I2: Ints, image_token_id: int) -> Ints:
    """Rotary positions [3, T] of an already expanded stream; each sequence starts at 0.

    grid_I2: (rows, columns) of image tokens of each image, in stream order. Raises DataError when the image tokens of the
    stream are not those of the grids.
    """
    is_image_T = ids_T == image_token_id
    count_I = grid_I2[:, 0] * grid_I2[:, 1]
    if int(is_image_T.sum()) != int(count_I.sum()):
        raise DataError(
            f"{int(is_image_T.sum())} image tokens in the stream, the images make {int(count_I.sum())}"
        )
    is_first_T = ~is_image_T
    if len(count_I):
        is_first_T[np.flatnonzero(is_image_T)[_before(count_I)]] = True
    before_T = np.concatenate([[0], np.cumsum(is_first_T)])
    lengths_S = np.diff(before_T[cu_seqlens])
    streams = expand_streams(ids_T[is_first_T], lengths_S[lengths_S > 0], grid_I2, image_token_id)
    assert np.array_equal(streams.token_ids_T, ids_T), "an image's tokens are not in one run"
    return streams.positions_3T
