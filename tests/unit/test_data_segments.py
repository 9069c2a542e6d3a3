"""Segments: streams are rebuilt id for id, and every valid response is trained exactly once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_cua.config.algo import AdvantageConfig
from slime_cua.core.actions import CodeAction, GuiAction, TerminateAction
from slime_cua.core.errors import DataError
from slime_cua.core.types import Episode, EpisodeGroup, ImageRef, Turn
from slime_cua.data.samples import make_train_samples, split_samples
from slime_cua.data.segments import build_segments

IMAGE_ID = 9
ACTIONS = {
    "gui": GuiAction(kind="wait"),
    "code": CodeAction(language="bash", code="true"),
    "terminate": TerminateAction(status="success"),
}


def image(number):
    return ImageRef(sha256=f"{number:064x}", width_px=64, height_px=64)


def make_turn(index, starts_segment, kind, num_response=2):
    """kind: an action, "format_error", or "cut" (neither action nor error). Ids are unique over the episode."""
    base = 100 * (index + 1)
    return Turn(
        index=index,
        starts_segment=starts_segment,
        context_ids=(base, IMAGE_ID, base + 1),
        context_images=(image(index),),
        response_ids=tuple(base + 10 + i for i in range(num_response)),
        response_logp=tuple(-0.1 * (i + 1) for i in range(num_response)),
        response_versions=(index,) * num_response,
        action=ACTIONS.get(kind),
        format_error="bad_json" if kind == "format_error" else None,
    )


def make_episode(kinds, starts=None, reward=1.0, episode_id="e", stop_reason="terminated", error=None):
    starts = starts or [index == 0 for index in range(len(kinds))]
    turns = tuple(
        make_turn(index, start, kind) for index, (kind, start) in enumerate(zip(kinds, starts, strict=True))
    )
    return Episode(
        episode_id=episode_id,
        group_id="g",
        task_id="t",
        turns=turns,
        reward=reward,
        stop_reason=stop_reason,
        error=error,
    )


def trained(segment):
    return [
        token for token, is_trained in zip(segment.token_ids, segment.is_trained, strict=True) if is_trained
    ]


def test_turns_join_to_one_stream_until_history_is_rewritten():
    first, second = build_segments(make_episode(["gui", "code", "gui"], [True, False, True]))
    assert first.token_ids == (100, IMAGE_ID, 101, 110, 111, 200, IMAGE_ID, 201, 210, 211)
    assert first.step_of_token == (-1, -1, -1, 0, 0, -1, -1, -1, 1, 1)
    assert first.logp == (0, 0, 0, -0.1, -0.2, 0, 0, 0, -0.1, -0.2)
    assert first.versions == (-1, -1, -1, 0, 0, -1, -1, -1, 1, 1)
    assert first.step_types == ("gui", "code") and first.images == (image(0), image(1))
    assert second.token_ids == (300, IMAGE_ID, 301, 310, 311) and second.images == (image(2),)
    assert (first.segment_id, second.segment_id) == ("e/0", "e/2")


def test_a_format_error_is_its_own_segment_and_masked_where_others_build_on_it():
    own, running = build_segments(make_episode(["gui", "format_error", "gui"]))
    assert own.is_format_error and own.step_types == ("format_error",)
    assert own.token_ids == (100, IMAGE_ID, 101, 110, 111, 200, IMAGE_ID, 201, 210, 211)
    assert trained(own) == [210, 211] and own.images == (image(0), image(1))
    assert not running.is_format_error
    assert trained(running) == [110, 111, 310, 311] and 210 in running.token_ids
    assert running.step_types == ("gui", "gui")
    assert max(running.step_of_token) == 1


def test_a_stream_without_valid_responses_gives_no_segment_of_its_own():
    segments = build_segments(make_episode(["format_error", "format_error"]))
    assert [segment.is_format_error for segment in segments] == [True, True]
    assert [trained(segment) for segment in segments] == [[110, 111], [210, 211]]


def test_a_response_cut_off_is_context_only():
    (segment,) = build_segments(make_episode(["gui", "cut"]))
    assert trained(segment) == [110, 111] and segment.token_ids[-1] == 211


def test_responses_with_a_token_that_is_too_old_are_context_and_the_rest_is_trained():
    episode = make_episode(["gui", "gui", "gui"])
    turns = [
        turn.model_copy(update={"response_versions": versions})
        for turn, versions in zip(episode.turns, [(3, 3), (3, 4), (4, 5)], strict=True)
    ]
    old = episode.model_copy(update={"turns": tuple(turns)})
    (segment,) = build_segments(old, oldest_version=4)
    assert segment.token_ids == build_segments(old)[0].token_ids, "what the engine saw stays"
    assert trained(segment) == list(turns[2].response_ids)
    assert build_segments(old, oldest_version=6) == []


def test_an_empty_episode_has_no_segments():
    assert build_segments(make_episode([])) == []


def test_a_first_turn_that_continues_is_refused_by_name():
    with pytest.raises(DataError, match="episode e: turn 0 continues"):
        build_segments(make_episode(["gui"], [False]))


def test_an_action_without_tokens_is_refused_by_name():
    episode = make_episode(["gui"])
    turn = episode.turns[0].model_copy(
        update={"response_ids": (), "response_logp": (), "response_versions": ()}
    )
    with pytest.raises(DataError, match="turn 0 has an action but no tokens"):
        build_segments(episode.model_copy(update={"turns": (turn,)}))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["gui", "code", "terminate", "format_error", "cut"]), st.booleans()),
        max_size=12,
    )
)
def test_each_response_is_trained_at_most_once_and_every_valid_one_exactly_once(plan):
    kinds = [kind for kind, _ in plan]
    starts = [index == 0 or start for index, (_, start) in enumerate(plan)]
    episode = make_episode(kinds, starts)
    segments = build_segments(episode)
    counts: dict[int, int] = {}
    for segment in segments:
        for token in trained(segment):
            counts[token] = counts.get(token, 0) + 1
    expected = {
        token: 1
        for turn, kind in zip(episode.turns, kinds, strict=True)
        if kind != "cut"
        for token in turn.response_ids
    }
    assert counts == expected
    prompts = _prompts(episode)
    for segment in segments:
        assert segment.token_ids.count(IMAGE_ID) == len(segment.images)
        by_step: dict[int, list[int]] = {}
        for position, step in enumerate(segment.step_of_token):
            if step >= 0:
                by_step.setdefault(step, []).append(position)
        assert sorted(by_step) == list(range(len(segment.step_types)))
        for positions in by_step.values():
            first = segment.token_ids[positions[0]]
            assert segment.token_ids[: positions[0]] == prompts[first]
            turn = next(turn for turn in episode.turns if first in turn.response_ids)
            assert tuple(segment.logp[p] for p in positions) == turn.response_logp
            assert tuple(segment.versions[p] for p in positions) == turn.response_versions


def _prompts(episode):
    """{first id of a response: all ids the engine saw before it}."""
    prompts, stream = {}, ()
    for turn in episode.turns:
        stream = (() if turn.starts_segment else stream) + turn.context_ids
        prompts[turn.response_ids[0]] = stream
        stream += turn.response_ids
    return prompts


def group(*episodes):
    return EpisodeGroup(group_id="g", task_id="t", episodes=episodes, admitted_version=0)


def test_advantages_are_over_episodes_however_many_segments_they_have():
    long = make_episode(["gui"] * 4, [True] * 4, reward=1.0, episode_id="long")
    short = make_episode(["gui"], reward=0.0, episode_id="short")
    samples = make_train_samples([group(long, short)], AdvantageConfig(std_eps=0.0))
    assert [sample.advantage for sample in samples] == pytest.approx([0.5**0.5] * 4 + [-(0.5**0.5)])
    assert [sample.sample_weight for sample in samples] == [1.0] * 5
    by_episode = make_train_samples([group(long, short)], AdvantageConfig(segment_weight="episode"))
    assert [sample.sample_weight for sample in by_episode] == [0.25] * 4 + [1.0]


def test_invalid_episodes_give_no_samples_and_leave_the_baseline():
    good, bad = (
        make_episode(["gui"], reward=1.0, episode_id="a"),
        make_episode(["gui"], reward=0.0, episode_id="b"),
    )
    broken = [
        make_episode(["gui", "format_error"], reward=None, episode_id="c"),
        make_episode(["gui"], reward=0.0, error="SandboxError: gone", episode_id="d"),
        make_episode(["gui"], reward=0.0, stop_reason="cancelled", episode_id="x"),
    ]
    samples = make_train_samples([group(good, *broken, bad)], AdvantageConfig())
    alone = make_train_samples([group(good, bad)], AdvantageConfig())
    assert samples == alone and [sample.segment.episode_id for sample in samples] == ["a", "b"]


def test_a_score_that_is_no_number_makes_the_episode_invalid_its_format_errors_too():
    good = make_episode(["gui"], reward=1.0, episode_id="good")
    poor = make_episode(["gui"], reward=0.0, episode_id="poor")
    odd = make_episode(["gui", "format_error"], reward=float("nan"), episode_id="odd")
    config = AdvantageConfig(has_format_errors_in_baseline=True)
    assert not odd.is_valid
    assert make_train_samples([group(good, odd, poor)], config) == make_train_samples(
        [group(good, poor)], config
    )


def test_a_format_error_has_reward_zero_and_its_own_advantage_in_an_episode_that_succeeded():
    mixed = make_episode(["gui", "format_error", "gui"], reward=1.0, episode_id="a")
    other = make_episode(["gui"], reward=1.0, episode_id="b")
    samples = make_train_samples([group(mixed, other)], AdvantageConfig())
    assert [(sample.reward, sample.advantage) for sample in samples] == [(0.0, -2.0), (1.0, 0.0), (1.0, 0.0)]


def test_shuffled_advantages_are_a_seeded_permutation():
    groups = [
        group(*(make_episode(["gui"], reward=float(i % 2), episode_id=f"{g}-{i}") for i in range(8)))
        for g in range(4)
    ]
    plain = [sample.advantage for sample in make_train_samples(groups, AdvantageConfig())]
    config = AdvantageConfig(is_shuffled=True)
    shuffled = [sample.advantage for sample in make_train_samples(groups, config, seed=3)]
    assert sorted(shuffled) == sorted(plain) and shuffled != plain
    assert [sample.advantage for sample in make_train_samples(groups, config, seed=3)] == shuffled


def test_start_and_end_tokens_stand_as_sampled_neither_doubled_nor_invented():
    start, end = 7, 8
    ended = Turn(
        index=0,
        starts_segment=True,
        context_ids=(start, 30, 31, 32),
        response_ids=(40, end),
        response_logp=(-0.1, -0.2),
        response_versions=(0, 0),
        action=ACTIONS["gui"],
    )
    cut = ended.model_copy(
        update={"index": 1, "starts_segment": False, "context_ids": (33,), "response_ids": (41, 42)}
    )
    episode = make_episode([]).model_copy(update={"turns": (ended, cut)})
    (segment,) = build_segments(episode)
    assert segment.token_ids == (start, 30, 31, 32, 40, end, 33, 41, 42)
    assert segment.token_ids.count(start) == 1 and segment.token_ids.count(end) == 1


def test_shares_of_a_collection_hold_each_sample_once_and_differ_by_at_most_one():
    episodes = (make_episode(["gui"], reward=float(i % 2), episode_id=f"e{i}") for i in range(5))
    samples = make_train_samples([group(*episodes)], AdvantageConfig())
    assert split_samples(samples, 1) == [samples]
    shares = split_samples(samples, 2, seed=3)
    assert [len(share) for share in shares] == [3, 2]
    names = [sample.segment.segment_id for share in shares for sample in share]
    assert sorted(names) == sorted(sample.segment.segment_id for sample in samples)
    assert shares == split_samples(samples, 2, seed=3) != split_samples(samples, 2, seed=4)
    assert [len(share) for share in split_samples(samples, 9)] == [1] * 5
    assert split_samples([], 3) == [[]]
