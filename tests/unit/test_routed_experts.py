"""Recorded experts: a record holds what the engine chose, joins over turns, and lands on the packed rows it belongs to."""

import numpy as np
import pytest

from slime_cua.core.errors import DataError
from slime_cua.core.routing import RoutedExperts, join
from slime_cua.core.types import Episode, Turn
from slime_cua.data.packing import pack
from slime_cua.data.segments import build_segments
from slime_cua.trainer.routing import load_metrics
from tests.unit.test_packing import IMAGES, make_sample


def experts(first, count, layers=2, top_k=2):
    """Position p of layer l chose experts 10 p + l and 10 p + l + 1 (mod 200)."""
    p, layer, k = np.ogrid[first : first + count, :layers, :top_k]
    return (10 * p + layer + k) % 200


@pytest.mark.parametrize("highest", [255, 256, 511])
def test_a_record_gives_back_what_was_put_in(highest):
    array = np.arange(highest - 23, highest + 1).reshape(4, 3, 2)
    record = RoutedExperts.from_array(array, start=7)
    again = RoutedExperts.model_validate_json(record.model_dump_json())
    assert np.array_equal(again.to_array(), array)
    assert (again.num_tokens, again.start, again.end) == (4, 7, 11)
    assert again.bytes_per_id == (1 if highest < 256 else 2)


def test_a_cut_record_and_one_of_another_shape_are_refused():
    record = RoutedExperts.from_array(experts(0, 3))
    with pytest.raises(ValueError, match="no multiple of 4 a token"):
        RoutedExperts(start=0, num_layers=2, top_k=2, data=record.data[:-8])
    with pytest.raises(ValueError, match="one stream"):
        join([record, RoutedExperts.from_array(experts(3, 2, layers=3), start=3)])


def test_cut_gives_the_positions_asked_for_or_nothing():
    record = RoutedExperts.from_array(experts(5, 6), start=5)
    part = record.cut(7, 9)
    assert (part.start, part.end) == (7, 9)
    assert np.array_equal(part.to_array(), experts(7, 2))
    assert record.cut(0, 5) is None and record.cut(11, 20) is None
    assert record.cut(0, 99) == record


def test_of_two_records_of_a_position_the_earlier_holds_and_a_gap_ends_the_stream():
    first = RoutedExperts.from_array(experts(0, 4))
    other = RoutedExperts.from_array(experts(50, 5), start=2)
    joined = join([first, None, other, RoutedExperts.from_array(experts(9, 2), start=9)])
    assert joined.end == 7
    assert np.array_equal(joined.to_array(), np.concatenate([experts(0, 4), experts(52, 3)]))
    assert join([other]) is None and join([]) is None


def turn(index, starts, context, response, record, action=True):
    from slime_cua.core.actions import TerminateAction

    return Turn(
        index=index,
        starts_segment=starts,
        context_ids=tuple(context),
        response_ids=tuple(response),
        response_logp=(0.0,) * len(response),
        response_versions=(0,) * len(response),
        action=TerminateAction(status="success") if action else None,
        format_error=None if action else "bad_json",
        routed_experts=record,
    )


def test_a_segment_joins_the_records_of_its_turns_and_a_format_error_keeps_its_context():
    """Stream: 3 context + 2 response, then 2 context + 2 response; a turn's last token is run by the next turn."""
    turns = (
        turn(0, True, [1, 1, 1], [5, 6], RoutedExperts.from_array(experts(0, 4))),
        turn(1, False, [1, 1], [7, 8], RoutedExperts.from_array(experts(4, 4), start=4), action=False),
        turn(2, True, [1], [9], RoutedExperts.from_array(experts(30, 1))),
    )
    episode = Episode(
        episode_id="e", group_id="g", task_id="t", turns=turns, reward=1.0, stop_reason="terminated"
    )
    error, first, second = sorted(
        build_segments(episode), key=lambda s: (not s.is_format_error, s.segment_id)
    )
    assert np.array_equal(first.routed_experts.to_array(), experts(0, 8))
    assert np.array_equal(error.routed_experts.to_array(), experts(0, 8))
    assert np.array_equal(second.routed_experts.to_array(), experts(30, 1))


def with_record(sample, count, **shape):
    record = RoutedExperts.from_array(experts(0, count, **shape))
    return sample.model_copy(update={"segment": sample.segment.model_copy(update={"routed_experts": record})})


def only(samples, **options):
    ((batch,),) = pack(samples, max_tokens=64, num_dp=1, images=IMAGES, **options).micro_batches
    return batch


def test_records_land_on_their_rows_and_everything_else_is_unknown():
    """s0 has 9 expanded tokens, 8 of them recorded; s1 has no record; padding has none."""
    plain = make_sample("s1")
    recorded = with_record(make_sample("s0"), 8)
    batch = only([plain, recorded], pad_multiple=4)
    size = batch.cu_seqlens[1]
    assert batch.routed_TLK.shape == (batch.num_tokens, 2, 2)
    assert np.array_equal(batch.routed_TLK[:8], experts(0, 8))
    assert (batch.routed_TLK[8:] == -1).all() and size > 8
    assert only([plain]).routed_TLK is None


def test_a_record_longer_than_its_segment_and_two_shapes_in_a_batch_are_refused_by_name():
    with pytest.raises(DataError, match="segment s0 has 60 recorded routings"):
        only([with_record(make_sample("s0"), 60)])
    with pytest.raises(DataError, match="different shape"):
        only([with_record(make_sample("s0"), 4), with_record(make_sample("s1"), 4, layers=3)])


def test_load_metrics_of_hand_worked_counts():
    """Layer 0: 6 2 0 0 of 8, mean 2: busiest 3x, two idle. Layer 1 is even."""
    sums = {f"expert/0/{e}": float(n) for e, n in enumerate((6, 2, 0, 0))}
    sums |= {f"expert/1/{e}": 2.0 for e in range(4)} | {"replayed_choices": 8.0, "replayed_own": 6.0}
    assert load_metrics(sums, "moe/") == {
        "moe/load_max": 2.0,
        "moe/idle_share": 0.25,
        "moe/replayed_share": 0.5,
        "moe/replay_agreement": 0.75,
    }
    assert load_metrics({}, "moe/") == {}
