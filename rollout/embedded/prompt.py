"""From a request's rollout ids and images to what the model runs on: expanded ids, M-RoPE positions, cache keys.

Legend: N expanded tokens of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Grid = tuple[int, int, int]
"""Patches of one image: time, height, width (before the spatial merge)."""


@dataclass(frozen=True)
class ImageSpan:
    """Where image number `index` of a request lies in the expanded prompt."""

    index: int
    start: int
    length: int


@dataclass(frozen=True)
class Prompt:
    """An expanded prompt, e.g. ids [5, <image> x 240, 9] for rollout ids [5, <image>, 9]."""

    ids_N: IntArray
    keys_N: IntArray
    """What a cached prefix is matched by: the id, or for an image's tokens a number made from the image's bytes."""
    positions_3N: IntArray
    next_position: int
    """M-RoPE position of the first token after the prompt (all three axes are equal there)."""
    spans: tuple[ImageSpan, ...]

    @property
    def num_image_tokens(self) -> int:
        return sum(span.length for span in self.spans)


def build_prompt(
    rollout_ids: Sequence[int],
    image_grids: Sequence[Grid],
    image_sha256: Sequence[str],
    image_token_id: int,
    merge_size: int,
) -> Prompt:
    """Expand one placeholder an image to the image's tokens.

    An image of grid (t, h, w) has t * h * w / merge_size^2 tokens. Positions count text by one; an image's tokens carry
    (t, row, column) from the current position, and text goes on max(h, w) / merge_size later.
    Raises ValueError when placeholders and images differ in number.
    Source: Qwen2-VL (arXiv 2409.12191), section 2.1, multimodal rotary position embedding.
    """
    num_placeholders = sum(1 for token in rollout_ids if token == image_token_id)
    if num_placeholders != len(image_grids):
        raise ValueError(
            f"input_ids hold {num_placeholders} image placeholders (id {image_token_id}) and the request has "
            f"{len(image_grids)} images: send exactly one placeholder an image, not expanded"
        )
    ids: list[IntArray] = []
    keys: list[IntArray] = []
    positions: list[IntArray] = []
    spans: list[ImageSpan] = []
    length = position = run_start = 0
    tokens = np.asarray(rollout_ids, dtype=np.int64)
    places = [*np.flatnonzero(tokens == image_token_id).tolist(), len(tokens)]
    for index, place in enumerate(places):
        text = tokens[run_start:place]
        ids.append(text)
        keys.append(text)
        positions.append(np.broadcast_to(position + np.arange(len(text)), (3, len(text))))
        length, position, run_start = length + len(text), position + len(text), place + 1
        if index == len(image_grids):
            break
        image_positions, step = _image_positions(image_grids[index], merge_size)
        count = image_positions.shape[1]
        ids.append(np.full(count, image_token_id, dtype=np.int64))
        keys.append(np.full(count, image_key(image_sha256[index]), dtype=np.int64))
        positions.append(image_positions + position)
        spans.append(ImageSpan(index, length, count))
        length, position = length + count, position + step
    return Prompt(
        np.concatenate(ids), np.concatenate(keys), np.concatenate(positions, axis=1), position, tuple(spans)
    )


def image_key(sha256: str) -> int:
    """A negative number that stands for the image's tokens, so that it never equals a token id."""
    return -1 - int(sha256[:15], 16)


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Number of leading elements that are equal."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _image_positions(grid: Grid, merge_size: int) -> tuple[IntArray, int]:
    frames, rows, columns = grid[0], grid[1] // merge_size, grid[2] // merge_size
    axes = np.meshgrid(np.arange(frames), np.arange(rows), np.arange(columns), indexing="ij")
    return np.stack([axis.reshape(-1) for axis in axes]).astype(np.int64), max(rows, columns)
