"""Expanded streams and rotary positions against a plain loop, transformers, and numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_cua.core.errors import DataError
from slime_cua.trainer.streams import expand_streams, packed_positions

IMAGE = 99


def test_positions_of_the_worked_example() -> None:
    streams = expand_streams(np.array([5, IMAGE, 6]), np.array([3]), np.array([[2, 3]]), IMAGE)
    assert streams.token_ids_T.tolist() == [5] + [IMAGE] * 6 + [6]
    columns = ["".join(map(str, column)) for column in streams.positions_3T.T.tolist()]
    assert columns == ["000", "111", "112", "113", "121", "122", "123", "444"]
    assert streams.start_N.tolist() == [0, 1, 7]
    assert streams.lengths_S.tolist() == [8]


def slow(samples: list[list[int]], grids: list[tuple[int, int]]) -> tuple[list[int], list[list[int]]]:
    """One token after the other."""
    ids: list[int] = []
    positions: list[list[int]] = []
    left = iter(grids)
    for sample in samples:
        at = 0
        for token in sample:
            if token != IMAGE:
                ids.append(token)
                positions.append([at] * 3)
                at += 1
                continue
            rows, columns = next(left)
            for row in range(rows):
                for column in range(columns):
                    ids.append(IMAGE)
                    positions.append([at, at + row, at + column])
            at += max(rows, columns)
    return ids, positions


@given(
    st.lists(st.lists(st.sampled_from([1, 2, IMAGE]), min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=24, max_size=24),
)
def test_any_batch_equals_the_loop(samples: list[list[int]], grids: list[tuple[int, int]]) -> None:
    ids_N = np.array([token for sample in samples for token in sample], dtype=np.int64)
    grid_I2 = np.array(grids[: int((ids_N == IMAGE).sum())], dtype=np.int64).reshape(-1, 2)
    streams = expand_streams(ids_N, np.array([len(s) for s in samples]), grid_I2, IMAGE)
    ids, positions = slow(samples, grids)
    assert streams.token_ids_T.tolist() == ids
    assert streams.positions_3T.T.tolist() == positions
    bounds = np.concatenate([[0], np.cumsum(streams.lengths_S)]).astype(np.int32)
    assert packed_positions(np.array(ids), bounds, grid_I2, IMAGE).T.tolist() == positions


def test_a_padding_sequence_counts_from_zero() -> None:
    found = packed_positions(
        np.array([1, 2, 0, 0, 0]), np.array([0, 2, 5], dtype=np.int32), np.zeros((0, 2), int), IMAGE
    )
    assert found.tolist() == [[0, 1, 0, 1, 2]] * 3


def test_placeholders_without_images_are_refused() -> None:
    with pytest.raises(DataError, match="2 image placeholders for 1 images"):
        expand_streams(np.array([IMAGE, IMAGE]), np.array([2]), np.array([[1, 1]]), IMAGE)
    with pytest.raises(DataError, match="1 image tokens in the stream, the images make 2"):
        packed_positions(np.array([IMAGE]), np.array([0, 1], dtype=np.int32), np.array([[1, 2]]), IMAGE)
