"""Packing: nothing lost, nothing over budget, rows where the head predicts, order does not matter."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_cua.core.errors import DataError
from slime_cua.core.types import ImageRef, Segment, TrainSample
from slime_cua.data.batch import STEP_TYPES, empty_batch, oldest_version
from slime_cua.data.expand import ImageProcessorConfig
from slime_cua.data.packing import CostModel, assign_bins, pack

IMAGE_ID = 99
IMAGES = ImageProcessorConfig(
    image_token_id=IMAGE_ID, patch_size_px=16, merge_size=2, min_pixels=1, max_pixels=1 << 30
)


def image(number, width_px=64, height_px=32):
    return ImageRef(sha256=f"{number:064x}", width_px=width_px, height_px=height_px)


def make_sample(name, responses=(2, 1), num_images=1, advantage=1.0, weight=1.0, context=2):
    """Each step: `context` ids, an image for the first num_images steps, then `responses[i]` trained ids."""
    ids, trained, logp, versions, steps, images = [], [], [], [], [], []
    for step, count in enumerate(responses):
        before = [1] * context + ([IMAGE_ID] if step < num_images else [])
        images += [image(step)] if step < num_images else []
        ids += before + [10 + step] * count
        trained += [False] * len(before) + [True] * count
        logp += [0.0] * len(before) + [-0.5 - step] * count
        versions += [-1] * len(before) + [step] * count
        steps += [-1] * len(before) + [step] * count
    segment = Segment(
        segment_id=name,
        episode_id="e",
        group_id="g",
        task_id="t",
        token_ids=tuple(ids),
        is_trained=tuple(trained),
        logp=tuple(logp),
        versions=tuple(versions),
        step_of_token=tuple(steps),
        step_types=tuple("gui" if step % 2 == 0 else "code" for step in range(len(responses))),
        images=tuple(images),
    )
    return TrainSample(segment=segment, advantage=advantage, sample_weight=weight)


def pack_all(samples, **options):
    return pack(samples, **({"max_tokens": 64, "num_dp": 1, "images": IMAGES} | options))


def only_batch(samples, **options):
    ((batch,),) = pack_all(samples, **options).micro_batches
    return batch


def test_streams_are_expanded_and_shifted_onto_the_rows_that_predict_them():
    batch = only_batch([make_sample("a")])
    # rollout ids 1 1 IMG 10 10 1 1 11; the image is 64x32 px = two tokens
    assert batch.input_ids_T.tolist() == [1, 1, 99, 99, 10, 10, 1, 1, 11]
    assert batch.target_T.tolist() == [1, 99, 99, 10, 10, 1, 1, 11, -1]
    assert batch.is_trained_T.tolist() == [False, False, False, True, True, False, False, True, False]
    assert batch.old_logp_T.tolist() == [0, 0, 0, -0.5, -0.5, 0, 0, -1.5, 0]
    assert batch.version_T.tolist() == [-1, -1, -1, 0, 0, -1, -1, 1, -1]
    assert batch.step_id_T.tolist() == [-1, -1, -1, 0, 0, -1, -1, 1, -1]
    assert batch.sees_image_T.tolist() == [False, False, True, True, True, True, True, True, True]
    assert [STEP_TYPES[i] for i in batch.step_type_K] == ["gui", "code"]
    assert batch.cu_seqlens.tolist() == [0, 9] and batch.max_seqlen == 9
    assert batch.num_trained == 3 and oldest_version(batch) == 0
    assert batch.position_in_segment_T.tolist() == list(range(9))
    assert batch.step_weights({name: float(i) for i, name in enumerate(STEP_TYPES)}).tolist() == [0.0, 1.0]


def test_segments_follow_each_other_and_steps_are_numbered_over_the_batch():
    batch = only_batch([make_sample("b", advantage=-1.0, weight=0.5), make_sample("a")], max_tokens=18)
    assert batch.segment_names == ("a", "b")
    assert batch.cu_seqlens.tolist() == [0, 9, 18]
    assert batch.segment_id_T.tolist() == [0] * 9 + [1] * 9
    assert batch.sees_image_T.tolist() == 2 * ([False] * 2 + [True] * 7), (
        "an image is of its own segment only"
    )
    assert batch.step_id_T[batch.is_trained_T].tolist() == [0, 0, 1, 2, 2, 3]
    assert batch.advantage_S.tolist() == [1, -1] and batch.sample_weight_S.tolist() == [1, 0.5]
    assert batch.target_T[8] == -1 and not batch.is_trained_T[8]
    assert batch.images_I == (image(0), image(0)) and batch.distinct_images == (image(0),)
    assert batch.image_index_I.tolist() == [0, 0]


def test_padding_is_a_sequence_of_its_own_and_counts_for_nothing():
    step = pack_all([make_sample("a")], pad_multiple=8, pad_id=7)
    ((batch,),) = step.micro_batches
    assert batch.num_tokens == 16 and batch.num_padding == 7
    assert batch.cu_seqlens.tolist() == [0, 9, 16]
    assert batch.input_ids_T[9:].tolist() == [7] * 7 and not batch.is_trained_T[9:].any()
    assert batch.segment_id_T[9:].tolist() == [1] * 7
    assert step.padding_share == 7 / 16


def test_every_rank_gets_the_same_number_of_micro_batches_and_some_may_be_empty():
    step = pack_all([make_sample(f"s{i}") for i in range(3)], max_tokens=9, num_dp=2, pad_multiple=1)
    assert [len(rank) for rank in step.micro_batches] == [2, 2]
    empty = [batch for rank in step.micro_batches for batch in rank if batch.num_segments == 0]
    assert len(empty) == 1 and empty[0].num_trained == 0 and empty[0].num_tokens == 1
    assert (step.num_samples, step.num_tokens, step.num_segments) == (3.0, 9, 3)


def test_no_samples_give_one_empty_micro_batch_a_rank():
    step = pack_all([], num_dp=3)
    assert [[batch.num_segments for batch in rank] for rank in step.micro_batches] == [[0], [0], [0]]
    assert (step.num_samples, step.num_tokens, step.padding_share) == (0.0, 0, 1.0)
    assert (
        empty_batch().num_tokens == 0
        and empty_batch().max_seqlen == 0
        and oldest_version(empty_batch()) is None
    )


def test_samples_of_weight_zero_are_left_out_and_denominators_are_sums_of_weights():
    step = pack_all(
        [make_sample("a", weight=0.25), make_sample("b", weight=0.0), make_sample("c", weight=0.5)]
    )
    assert (step.num_samples, step.num_tokens, step.num_segments) == (0.75, 6, 2)


def test_skipped_zero_advantages_still_count_in_the_denominators():
    samples = [make_sample("a"), make_sample("b", advantage=0.0)]
    step = pack_all(samples, is_zero_skipped=True)
    assert [batch.segment_names for rank in step.micro_batches for batch in rank] == [("a",)]
    assert (step.num_samples, step.num_tokens) == (2.0, 6)


def _with_segment(sample, **changes):
    return sample.model_copy(update={"segment": sample.segment.model_copy(update=changes)})


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            make_sample("long", responses=(80,)),
            "segment long has 84 tokens with images expanded, the budget is 64",
        ),
        (make_sample("none", responses=()), "segment none has no trained token"),
        (_with_segment(make_sample("shot"), images=()), "segment shot: 1 image placeholders for 0 images"),
        (make_sample("bare", responses=(2,), num_images=0, context=0), "segment bare trains its first token"),
        (
            _with_segment(make_sample("steps"), step_types=("gui",)),
            "segment steps has steps 0..1 for 1 step types",
        ),
        (make_sample("nan", advantage=float("nan")), "segment nan: advantage nan"),
        (make_sample("minus", weight=-1.0), "sample_weight -1.0"),
        (
            _with_segment(make_sample("logp"), logp=(float("nan"),) * 8),
            "segment logp has a log-prob that is NaN",
        ),
        (
            _with_segment(make_sample("sampled"), token_ids=(1, 1, 9, 99, 10, 1, 1, 11)),
            "segment sampled trains an image placeholder",
        ),
    ],
)
def test_samples_that_cannot_be_trained_are_refused_by_name_or_listed(sample, message):
    with pytest.raises(DataError, match=message):
        pack_all([make_sample("good"), sample])
    step = pack_all([make_sample("good"), sample], on_refused="drop")
    assert len(step.refused) == 1 and message in step.refused[0]
    assert (step.num_samples, step.num_segments) == (1.0, 1)


def test_the_packing_does_not_depend_on_the_order_of_samples():
    samples = [make_sample(f"s{i}", responses=(1 + i % 5, 2)) for i in range(20)]
    plain = pack_all(samples, max_tokens=30, num_dp=2)
    random.Random(0).shuffle(samples)
    mixed = pack_all(samples, max_tokens=30, num_dp=2)
    for first, second in zip(plain.micro_batches, mixed.micro_batches, strict=True):
        for left, right in zip(first, second, strict=True):
            for field in dataclasses.fields(left):
                assert np.array_equal(getattr(left, field.name), getattr(right, field.name)), field.name


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), max_size=25),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8]),
)
def test_every_sample_is_in_exactly_one_micro_batch_within_the_budget(plan, num_dp, pad_multiple):
    samples = [make_sample(f"s{i:02}", responses=tuple(lengths)) for i, lengths in enumerate(plan)]
    step = pack_all(samples, max_tokens=48, num_dp=num_dp, pad_multiple=pad_multiple)
    batches = [batch for rank in step.micro_batches for batch in rank]
    assert sorted(name for batch in batches for name in batch.segment_names) == sorted(
        sample.segment.segment_id for sample in samples
    )
    assert len({len(rank) for rank in step.micro_batches}) == 1
    assert (
        sum(batch.num_trained for batch in batches)
        == sum(sum(lengths) for lengths in plan)
        == step.num_tokens
    )
    for batch in batches:
        assert batch.num_tokens <= 48 and batch.num_tokens % pad_multiple == 0
        rows = batch.is_trained_T.nonzero()[0]
        assert (batch.target_T[rows] == batch.input_ids_T[rows + 1]).all()
        assert (batch.segment_id_T[rows] == batch.segment_id_T[rows + 1]).all()
        assert len(batch.step_type_K) == len(set(batch.step_id_T[rows].tolist()))
        assert (batch.input_ids_T == IMAGE_ID).sum() == 2 * len(batch.images_I)
        assert batch.cu_seqlens[-1] == batch.num_tokens


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 8))
def test_bins_hold_everything_and_are_fewer_than_twice_the_least_number(sizes, num_dp):
    bins = assign_bins([(size, float(size)) for size in sizes], 100, num_dp)
    assert sorted(i for items in bins for i in items) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in items) <= 100 for items in bins)
    least = -(-sum(sizes) // 100)
    assert len(bins) % num_dp == 0 and len(bins) < 2 * max(1, least) + num_dp


def test_ranks_are_balanced_by_predicted_cost():
    rng = random.Random(1)
    samples = [make_sample(f"s{i}", responses=(rng.randint(1, 30),)) for i in range(200)]
    step = pack_all(samples, max_tokens=256, num_dp=4)
    assert max(step.cost_by_rank) / min(step.cost_by_rank) < 1.1


def test_attention_makes_one_long_segment_cost_more_than_two_halves():
    model = CostModel()
    assert model.cost(20_000, 0, 0) > 2 * model.cost(10_000, 0, 0)
    assert model.cost(100, 50, 0) > model.cost(100, 0, 0) and model.cost(100, 0, 9) > model.cost(100, 0, 0)


def test_a_budget_below_the_padding_unit_is_refused():
    with pytest.raises(ValueError, match="max_tokens 4 must be at least pad_multiple 8"):
        pack_all([], max_tokens=4, pad_multiple=8)
