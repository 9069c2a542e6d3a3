"""How the vision tower's work is divided and remembered, with a tower that only counts."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_cua.trainer.batch import Microbatch
from slime_cua.trainer.vision import VisionTower, split_evenly


@pytest.mark.parametrize(
    "counts, num_ranks, bounds",
    [
        ([4, 1, 1, 1, 1], 2, [0, 1, 5]),
        ([3, 3, 3, 3], 4, [0, 1, 2, 3, 4]),
        ([5], 2, [0, 0, 1]),
        ([], 2, [0, 0, 0]),
    ],
)
def test_bounds_worked_by_hand(counts: list[int], num_ranks: int, bounds: list[int]) -> None:
    assert split_evenly(counts, num_ranks) == bounds


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 5))
def test_every_image_has_one_rank_and_no_rank_has_much_more_than_its_part(
    counts: list[int], num_ranks: int
) -> None:
    bounds = split_evenly(counts, num_ranks)
    assert bounds[0] == 0 and bounds[-1] == len(counts) and bounds == sorted(bounds)
    parts = [sum(counts[a:b]) for a, b in itertools.pairwise(bounds)]
    assert max(parts) <= sum(counts) / num_ranks + max(counts, default=0)


class Counting(torch.nn.Module):
    """Gives each image token (one a patch here) its patch's first number; says how many patches it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(spatial_merge_size=1, out_hidden_size=1)
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[int] = []

    def forward(self, patches: torch.Tensor, grid_thw: torch.Tensor) -> Any:
        self.seen.append(len(patches))
        return SimpleNamespace(pooler_output=patches[:, :1] * self.weight)


def batch(names: str, fresh: str, tokens: list[int]) -> Microbatch:
    """Images a (1 patch, value 1), b (2 patches, value 2), c (3 patches, value 3)."""
    size = {"a": 1, "b": 2, "c": 3}
    none = torch.zeros(0, dtype=torch.int64)
    values = [float(size[name]) for name in fresh for _ in range(size[name])]
    return Microbatch(
        token_ids_T=none,
        positions_3T=none,
        cu_seqlens=none,
        max_seqlen=0,
        row_R=none,
        target_R=none,
        patches=torch.tensor(values).reshape(-1, 1),
        grid_I3=torch.tensor([(1, 1, size[name]) for name in fresh], dtype=torch.int64).reshape(-1, 3),
        patch_counts=tuple(size[name] for name in fresh),
        image_names=tuple(names),
        image_token_M=torch.tensor(tokens),
    )


def features(vision: VisionTower, tower: Counting, given_batch: Microbatch) -> list[float]:
    vision.batch = given_batch
    out: list[float] = tower(given_batch.patches, grid_thw=given_batch.grid_I3).pooler_output[:, 0].tolist()
    return out


def test_known_images_are_not_computed_again_and_occurrences_find_their_rows() -> None:
    tower = Counting()
    vision = VisionTower(tower, None, is_frozen=True, max_bytes=1000)
    assert features(vision, tower, batch("ab", "ab", [0, 1, 2, 0])) == [1, 2, 2, 1]
    assert vision.is_known("a") and not vision.is_known("c")
    assert features(vision, tower, batch("bca", "c", [0, 1, 2, 3, 4, 5])) == [2, 2, 3, 3, 3, 1]
    assert features(vision, tower, batch("ca", "", [0, 1, 2, 3])) == [3, 3, 3, 1]
    assert tower.seen == [3, 3]
    vision.forget()
    assert not vision.is_known("a")


def test_the_least_recently_used_features_go_first() -> None:
    tower = Counting()
    vision = VisionTower(tower, None, is_frozen=True, max_bytes=4 * 4)
    features(vision, tower, batch("ab", "ab", [0]))
    features(vision, tower, batch("ac", "c", [0]))
    assert [vision.is_known(name) for name in "abc"] == [True, False, True]


def test_a_tower_that_is_trained_remembers_nothing() -> None:
    tower = Counting()
    vision = VisionTower(tower, None, is_frozen=False, max_bytes=1000)
    features(vision, tower, batch("a", "a", [0]))
    assert not vision.is_known("a")


def test_text_without_images_runs_no_tower() -> None:
    tower = Counting()
    vision = VisionTower(tower, None, is_frozen=False, max_bytes=0)
    none = torch.zeros(0, dtype=torch.int64)
    vision.batch = Microbatch(none, none, none, 0, none, none)
    assert tower(torch.zeros(256, 1), grid_thw=none).pooler_output.shape == (1, 1)
    assert tower.seen == []
