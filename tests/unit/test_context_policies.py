"""Which screenshots stay: bounds, order, and the meaning of extend and rewrite."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.context import (
    Composed,
    ContextPolicy,
    LastImages,
    Seen,
    SkipOnMcpSuccess,
    SkipOnNoChange,
    SlidingWindow,
    View,
    context_policy,
    next_view,
)
from slime_cua.config.rollout import ContextConfig
from slime_cua.core.errors import ConfigError

SHOTS = [Seen(image_sha256=f"s{number}") for number in range(1, 30)]


def views(policy: ContextPolicy, history: Sequence[Seen]) -> list[View]:
    """The view of every prompt of an episode with these observations."""
    found: list[View] = []
    in_view: tuple[int, ...] = ()
    for end in range(1, len(history) + 1):
        found.append(next_view(policy, history[:end], in_view))
        in_view = found[-1].in_view
    return found


def test_when_the_eleventh_screenshot_arrives_the_five_newest_stay_in_a_new_segment() -> None:
    seen = views(SlidingWindow(max_images=10, retain=5), SHOTS[:17])
    assert [view.kind for view in seen[:10]] == ["extend"] * 10
    assert seen[9].in_view == tuple(range(10))
    assert seen[10] == View("rewrite", (6, 7, 8, 9, 10))
    assert [view.kind for view in seen[11:16]] == ["extend"] * 5
    assert seen[16] == View("rewrite", (12, 13, 14, 15, 16))


def test_last_images_shows_just_the_newest() -> None:
    seen = views(LastImages(2), SHOTS[:4])
    assert [view.in_view for view in seen] == [(0,), (0, 1), (1, 2), (2, 3)]
    assert [view.kind for view in seen] == ["extend", "extend", "rewrite", "rewrite"]


def test_a_text_observation_changes_no_view() -> None:
    seen = views(SlidingWindow(2, 1), [SHOTS[0], SHOTS[1], Seen(None), Seen(None), SHOTS[2]])
    assert [view.in_view for view in seen] == [(0,), (0, 1), (0, 1), (0, 1), (4,)]
    assert [view.kind for view in seen] == ["extend"] * 4 + ["rewrite"]


def test_only_the_screenshot_after_a_successful_tool_call_is_skipped() -> None:
    history = [
        SHOTS[0],
        Seen("a", after="mcp", is_success=True),
        Seen("b", after="mcp", is_success=False),
        Seen("c", after="mcp"),
        Seen("d", after="gui", is_success=True),
    ]
    assert views(SkipOnMcpSuccess(), history)[-1].in_view == (0, 2, 3, 4)


def test_an_unchanged_screenshot_is_skipped_at_most_twice_in_a_row() -> None:
    same = [Seen("same")] * 7
    assert views(SkipOnNoChange(), same)[-1].in_view == (0, 3, 6)
    assert views(SkipOnNoChange(), [Seen("a"), Seen("b"), Seen("b"), Seen("a")])[-1].in_view == (0, 1, 3)


def test_no_change_means_since_the_last_screenshot_that_was_shown() -> None:
    policy = Composed((SkipOnMcpSuccess(), SkipOnNoChange()))
    history = [Seen("a"), Seen("b", after="mcp", is_success=True), Seen("b"), Seen("b")]
    assert views(policy, history)[-1].in_view == (0, 2)


@st.composite
def episodes(draw: st.DrawFn) -> list[Seen]:
    image = st.none() | st.sampled_from(["a", "b", "c", "d"])
    after = st.sampled_from(["gui", "mcp", "format_error"])
    rest = st.lists(st.builds(Seen, image, after, st.sampled_from([None, True, False])), max_size=40)
    return [Seen("a"), *draw(rest)]


POLICIES = st.one_of(
    st.builds(
        lambda retain, more: SlidingWindow(retain + more, retain), st.integers(1, 4), st.integers(0, 4)
    ),
    st.builds(LastImages, st.integers(1, 4)),
)


@given(
    episodes(), POLICIES, st.lists(st.sampled_from([SkipOnMcpSuccess(), SkipOnNoChange()]), unique_by=type)
)
def test_no_view_passes_the_bound_and_all_move_forward(
    history: list[Seen], window: SlidingWindow | LastImages, skips: list[ContextPolicy]
) -> None:
    policy = Composed((*skips, window))
    bound = window.max_images if isinstance(window, SlidingWindow) else window.num_images
    before: tuple[int, ...] = ()
    for newest, view in enumerate(views(policy, history)):
        assert len(view.in_view) <= bound
        assert set(view.in_view) <= {*before, newest}
        assert list(view.in_view) == sorted(set(view.in_view))
        assert all(history[position].image_sha256 is not None for position in view.in_view)
        assert (view.kind == "extend") == (set(before) <= set(view.in_view))
        before = view.in_view


def test_policies_come_by_name_with_skips_before_windows() -> None:
    config = ContextConfig(name="sliding_window+skip_on_no_change", max_images=4, retain=2)
    assert context_policy(config) == Composed((SkipOnNoChange(), SlidingWindow(4, 2)))
    assert context_policy(ContextConfig(name="last_images", max_images=9)) == LastImages(9)
    assert context_policy(ContextConfig()) == SlidingWindow(10, 5)


class NewestOnly:
    """A policy of a user's own."""

    def __init__(self, config: ContextConfig) -> None:
        self.config = config

    def choose(self, history: Sequence[Seen], candidates: tuple[int, ...]) -> tuple[int, ...]:
        return candidates[-1:]


class Inventor:
    """A policy that shows what it was not offered."""

    def choose(self, history: Sequence[Seen], candidates: tuple[int, ...]) -> tuple[int, ...]:
        return (*candidates, 99)


def test_a_policy_of_ones_own_comes_by_module_and_name() -> None:
    policy = context_policy(ContextConfig(name=f"{__name__}:NewestOnly"))
    assert views(policy, SHOTS[:3])[-1] == View("rewrite", (2,))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("window", "sliding_window"),
        ("no.such.module:Name", "no"),
        (f"{__name__}:Nothing", "Nothing"),
        ("last_images+typo", "typo"),
    ],
)
def test_an_unknown_policy_names_what_is_known(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        context_policy(ContextConfig(name=name))


def test_a_window_that_retains_more_than_it_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match="retain"):
        context_policy(ContextConfig(max_images=3, retain=5))


def test_a_policy_that_shows_what_it_was_not_offered_is_refused() -> None:
    with pytest.raises(ValueError, match="Inventor"):
        next_view(Inventor(), SHOTS[:1], ())
