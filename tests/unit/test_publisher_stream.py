"""Digests, buckets and the broadcast group that weights travel by."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_cua.convert.weight_stream import (
    WeightGroup,
    buckets,
    combined_digest,
    dtype_name,
    dtype_of,
    tensor_digest,
)
from slime_cua.core.ports import free_port


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
def test_equal_tensors_have_equal_digests_and_any_changed_element_another(dtype: torch.dtype) -> None:
    tensor = torch.arange(35).reshape(5, 7).to(dtype)
    digest = tensor_digest(tensor)
    assert tensor_digest(tensor.t().contiguous().t()) == digest
    for index in range(35):
        changed = tensor.clone()
        changed.view(-1)[index] += 1
        assert tensor_digest(changed) != digest


def test_swapped_rows_another_shape_and_another_dtype_change_the_digest() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    others = [tensor[[1, 0, 2]], tensor.reshape(4, 3), tensor.double(), tensor * -1, torch.zeros(3, 4)]
    assert len({tensor_digest(other) for other in [tensor, *others]}) == 6


def test_a_digest_is_two_sums() -> None:
    """Worked by hand: words 1, 2, 3 sum to 6 and weigh 1 + 4 + 9 = 14."""
    assert tensor_digest(torch.tensor([1, 2, 3], dtype=torch.int32)) == f"int32[3]:{6:016x}{14:016x}"


def test_the_combined_digest_does_not_depend_on_order_but_on_names() -> None:
    assert combined_digest({"a": "1", "b": "2"}) == combined_digest({"b": "2", "a": "1"})
    assert combined_digest({"a": "1", "b": "2"}) != combined_digest({"a": "2", "b": "1"})


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 200))
def test_buckets_keep_order_and_bound(sizes: list[int], limit: int) -> None:
    tensors = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    made = list(buckets(tensors, limit))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in tensors]
    for bucket in made:
        assert bucket and (len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= limit)


def test_dtypes_travel_by_sglangs_names() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert dtype_of("bfloat16") is dtype_of("torch.bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match="'float23'"):
        dtype_of("float23")


def test_a_group_is_joined_beside_no_default_group_and_can_be_left_twice() -> None:
    group = WeightGroup.join("127.0.0.1", free_port(), 0, 1, "alone", "gloo", 20)
    group.broadcast([torch.zeros(2)])
    group.close()
    group.close()
    assert not torch.distributed.is_initialized()
