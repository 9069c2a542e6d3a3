"""Padding of packed batches: how little there is, and where it stands when segments are cut over context-parallel ranks."""

import random

import numpy as np
import pytest

from slime_cua.core.types import ImageRef, Segment, TrainSample
from slime_cua.data.expand import ImageProcessorConfig
from slime_cua.data.packing import pack

IMAGE_ID = 99
IMAGES = ImageProcessorConfig(
    image_token_id=IMAGE_ID, patch_size_px=16, merge_size=2, min_pixels=1, max_pixels=1 << 30
)


def segment_of(name, contexts, responses, num_images, size_wh_px=(64, 32)):
    """Turns of context ids, a screenshot in the first num_images of them, and trained ids."""
    shots = [
        ImageRef(sha256=f"{i:064x}", width_px=size_wh_px[0], height_px=size_wh_px[1])
        for i in range(num_images)
    ]
    ids, trained, steps = [], [], []
    for step, (context, response) in enumerate(zip(contexts, responses, strict=True)):
        before = [1] * context + [IMAGE_ID] * (step < num_images)
        ids += before + [10] * response
        trained += [False] * len(before) + [True] * response
        steps += [-1] * len(before) + [step] * response
    segment = Segment(
        segment_id=name,
        episode_id="e",
        group_id="g",
        task_id="t",
        token_ids=tuple(ids),
        is_trained=tuple(trained),
        logp=tuple(-0.5 if t else 0.0 for t in trained),
        versions=tuple(0 if t else -1 for t in trained),
        step_of_token=tuple(steps),
        step_types=("gui",) * len(responses),
        images=tuple(shots),
    )
    return TrainSample(segment=segment, advantage=1.0)


def screen_segments(num, seed):
    """Ragged segments of up to ten screenshots of 1504x832 (1,222 tokens each), as the trainer gets them."""
    rng = random.Random(seed)
    samples = []
    for number in range(num):
        turns = rng.randint(1, 10)
        contexts = [rng.randint(20, 300) for _ in range(turns)]
        responses = [rng.randint(20, 150) for _ in range(turns)]
        samples.append(segment_of(f"s{number:03}", contexts, responses, turns, (1504, 832)))
    return samples


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (4, 1), (1, 2), (4, 2), (2, 4)])
def test_less_than_three_per_cent_of_screenshot_segments_is_padding(tp, cp):
    """Not a tenth of that: a micro-batch is as long as its segments, rounded up for sequence parallelism."""
    chunks = 2 * cp if cp > 1 else 1
    step = pack(
        screen_segments(60, seed=tp * 10 + cp),
        max_tokens=32768 * cp,
        num_dp=2,
        images=IMAGES,
        pad_multiple=chunks * tp,
        segment_multiple=chunks,
    )
    batches = [batch for rank in step.micro_batches for batch in rank]
    own = sum(batch.num_tokens for batch in batches) - sum(batch.num_padding for batch in batches)
    assert own == sum(tokens_of(sample) for sample in screen_segments(60, seed=tp * 10 + cp))
    assert step.padding_share == pytest.approx(1 - own / sum(batch.num_tokens for batch in batches))
    assert step.padding_share < 0.003


def tokens_of(sample):
    images = len(sample.segment.images)
    return len(sample.segment.token_ids) + images * (47 * 26 - 1)


def test_a_segment_that_is_cut_gets_untrained_tokens_at_its_end_and_nothing_else_changes():
    samples = [segment_of("a", [2, 2], [2, 1], 1), segment_of("b", [3], [4], 0)]
    options = {"max_tokens": 64, "num_dp": 1, "images": IMAGES, "pad_id": 7}
    ((plain,),) = pack(samples, **options).micro_batches
    step = pack(samples, pad_multiple=8, segment_multiple=4, **options)
    ((cut,),) = step.micro_batches
    assert plain.cu_seqlens.tolist() == [0, 9, 16] and cut.cu_seqlens.tolist() == [0, 12, 20, 24]
    assert cut.num_padding == 3 + 1 + 4 and step.padding_share == 8 / 24
    own = np.r_[0:9, 12:19]
    pads = np.setdiff1d(np.arange(24), own)
    assert cut.input_ids_T[pads].tolist() == [7] * 8 and not cut.is_trained_T[pads].any()
    for name in (
        "input_ids_T",
        "target_T",
        "is_trained_T",
        "old_logp_T",
        "version_T",
        "step_id_T",
        "segment_id_T",
    ):
        assert getattr(cut, name)[own].tolist() == getattr(plain, name).tolist(), name


def test_a_segment_of_the_whole_budget_still_fits_when_it_is_cut():
    step = pack(
        [segment_of("a", [4], [9], 0)],
        max_tokens=16,
        num_dp=1,
        images=IMAGES,
        pad_multiple=8,
        segment_multiple=4,
    )
    ((batch,),) = step.micro_batches
    assert batch.num_tokens == 16 and batch.cu_seqlens.tolist() == [0, 16]
