"""Generated screens show what they say they show, and every question has the answer that one finds by looking."""

from pathlib import Path

import numpy as np
import pytest

from slime_cua.config.base import load
from slime_cua.core.errors import ConfigError, InfrastructureError
from slime_cua.evaluation import pointing
from slime_cua.synthesis import canvas
from slime_cua.synthesis.feed import Feed
from slime_cua.synthesis.pretrain import PretrainConfig, rate_at, stage_at
from slime_cua.synthesis.pretrain_data import (
    KIND_NAMES,
    UNTRAINED,
    Encoder,
    Lengths,
    Scene,
    Shape,
    Stage,
    make_batch,
    shape_of,
)
from slime_cua.synthesis.questions import KINDS, Question, ask, candidates, grid_text
from slime_cua.synthesis.screens import SCREEN_WH_PX, make_screen
from slime_cua.synthesis.starter import vocabulary
from slime_cua.synthesis.texts import make_text
from slime_cua.synthesis.things import COLOURS, HUES, Look

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny_base"
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "pretrain_tiny_base.yaml"
IMAGE_TOKENS = 10 * 6
"""Of one screen: the tiny base merges patches of 16 pixels 4 x 4."""


def screens(num: int, look: Look | None = None):
    return [make_screen(np.random.default_rng([5, i]), look or Look()) for i in range(num)]


def test_the_same_seed_gives_the_same_screen_and_questions():
    first, second = (make_screen(np.random.default_rng(7), Look()) for _ in range(2))
    assert np.array_equal(first.pixels, second.pixels)
    assert first.items == second.items
    weights = dict.fromkeys(KINDS, 1.0)
    asked = [ask(first, np.random.default_rng(8), weights, 9) for _ in range(2)]
    assert asked[0] == asked[1]


def test_things_stand_inside_the_screen_and_do_not_touch():
    width, height = SCREEN_WH_PX
    for screen in screens(60):
        for n, item in enumerate(screen.items):
            x0, y0, x1, y1 = item.box
            assert 0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height
            for other in screen.items[:n]:
                a0, b0, a1, b1 = other.box
                assert x1 <= a0 or a1 <= x0 or y1 <= b0 or b1 <= y0


def test_large_things_stay_inside_a_low_window():
    """A low window with a large close button leaves less height than the least side of a thing."""
    look = Look(side_px=(90, 112), kinds=("triangle", "circle", "cross", "square"), window_share=1.0)
    for screen in screens(150, look):
        left, top, right, bottom = screen.windows[-1].box
        for item in screen.items:
            x0, y0, x1, y1 = item.box
            assert left <= x0 < x1 <= right and top <= y0 < y1 <= bottom, (item, screen.windows[-1])


def test_the_middle_of_a_coloured_thing_has_its_colour():
    look = Look(kinds=("button", "circle", "square", "triangle", "cross"), word_share=0.0)
    seen = set()
    for screen in screens(80, look):
        for item in screen.items:
            x, y = (int(part) for part in item.center)
            near_pointer = (
                screen.pointer and abs(screen.pointer[0] - x) < 20 and abs(screen.pointer[1] - y) < 20
            )
            if item.color and not near_pointer:
                assert np.abs(screen.pixels[y, x].astype(int) - COLOURS[item.color]).max() <= 16, item
                seen.add(item.color)
    assert seen == set(COLOURS)


def test_distinct_colours_are_distinct():
    look = Look(num_items=(6, 6), are_colors_distinct=True, kinds=("button",))
    for screen in screens(10, look):
        assert sorted(item.color for item in screen.items) == sorted(HUES)


def test_a_word_leaves_ink_only_where_text_says_it_does():
    pixels = np.full((60, 200, 3), 255, np.uint8)
    x0, y0, x1, y1 = canvas.text(pixels, (20, 10), "moon", 24, (0, 0, 0))
    ink = np.argwhere(pixels.min(axis=2) < 128)
    assert len(ink) > 100
    assert ink[:, 1].min() >= x0 and ink[:, 1].max() < x1 and ink[:, 0].min() >= y0 and ink[:, 0].max() < y1


def test_points_are_answered_inside_their_box_on_the_grid():
    for screen in screens(40):
        for kind in KINDS:
            for question in candidates(screen, kind):
                if question.box is not None:
                    assert pointing.is_right(question, question.answer), question
                    assert all(int(v) % vocabulary.GRID_STEP == 0 for v in question.answer.split())


def test_colours_and_shapes_asked_for_are_unique_and_counts_are_right():
    for screen in screens(60):
        colours = [item.color for item in screen.items]
        kinds = [item.kind for item in screen.items]
        for question in candidates(screen, "point_color"):
            assert colours.count(question.about.split()[0]) == 1
        for question in candidates(screen, "point_shape"):
            assert kinds.count(question.about) == 1
        for question in candidates(screen, "point_both"):
            color, kind = question.about.split()
            assert list(zip(colours, kinds, strict=True)).count((color, kind)) == 1
        for question in candidates(screen, "count"):
            name = question.about.split()[0]
            assert int(question.answer) == (colours if name in HUES else kinds).count(name)


def test_the_left_one_is_left_of_all_others():
    found = 0
    for screen in screens(60):
        for question in candidates(screen, "point_place"):
            if question.about == "left one":
                (target,) = [item for item in screen.items if item.box == question.box]
                assert all(o.center[0] >= target.center[0] + 28 for o in screen.items if o is not target)
                found += 1
    assert found > 10


def test_presence_questions_are_true_and_as_often_yes_as_no():
    answers = []
    for screen in screens(150):
        for question in candidates(screen, "there"):
            color, kind = question.about.split()
            shown = any(i.color == color and kind in ("one", i.kind) for i in screen.items)
            assert (question.answer == "yes") == shown
            answers.append(shown)
    assert 0.4 < np.mean(answers) < 0.6


def test_no_question_holds_a_piece_of_the_action_grammar():
    rng = np.random.default_rng(0)
    for screen in screens(20):
        for kind in KINDS:
            for question in candidates(screen, kind):
                text = question.opening(rng) + question.answer
                assert not any(piece in text for piece in ("{", "[", "<", "action", "click", "coordinate"))


def test_grid_text_is_within_half_a_step_of_the_point():
    for x, y in ((0, 0), (320, 192), (639, 383), (13, 371)):
        gx, gy = (int(v) for v in grid_text(x, y).split())
        assert abs(gx - x / 640 * 1000) <= 10 and abs(gy - y / 384 * 1000) <= 10


def test_endings_of_copied_texts_repeat_their_openings():
    encoder = Encoder(TINY)
    rng = np.random.default_rng(3)
    texts = [make_text(rng, encoder.plain_ids) for _ in range(200)]
    copies = [(o, e) for o, e in texts if isinstance(o, str) and o.startswith("copy: ")]
    assert copies and all(o == f"copy: {e} = " for o, e in copies)
    assert all(o == e for o, e in texts if isinstance(o, list))


def some_stage() -> Stage:
    return Stage(scenes=(Scene(ask=dict.fromkeys(KINDS, 1.0)),))


def test_a_batch_is_full_of_tokens_and_trains_answers_only():
    encoder, lengths = Encoder(TINY), Lengths()
    for num_screens in (1, 2):
        batch = shape_of(lengths, 4, num_screens, IMAGE_TOKENS).allocate()
        make_batch(np.random.default_rng(1), some_stage(), encoder, batch)
        image = batch.token_ids_BL == encoder.image[1]
        assert (image.sum(axis=1) == IMAGE_TOKENS * num_screens).all()
        assert not (batch.kind_BL[image] != UNTRAINED).any()
        share = (batch.kind_BL != UNTRAINED).sum(axis=1) / (124 * num_screens)
        assert (share > 0.1).all() and (share < 0.6).all()
        assert (np.diff(batch.positions_3BL.max(axis=0).astype(int), axis=1) <= 20).all()


def test_trained_tokens_of_a_batch_decode_to_answers_of_the_screen():
    encoder, lengths = Encoder(TINY), Lengths()
    batch = shape_of(lengths, 1, 1, IMAGE_TOKENS).allocate()
    only_theme = Stage(scenes=(Scene(look=Look(dark_share=1.0), ask={"theme": 1.0}),))
    make_batch(np.random.default_rng(1), only_theme, encoder, batch)
    theme = batch.kind_BL[0] == KIND_NAMES.index("theme")
    assert batch.token_ids_BL[0][theme].tolist() == list(encoder.encode("dark\n"))


def number_fill(rng: np.random.Generator, plan: int, batch) -> None:
    batch.token_ids_BL[:] = rng.integers(0, 1000, batch.token_ids_BL.shape)
    batch.kind_BL[:] = plan


def broken_fill(rng: np.random.Generator, plan: int, batch) -> None:
    raise SystemExit(3)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_feed_gives_the_same_batches_whatever_the_number_of_workers():
    streams = []
    for num_workers in (1, 3):
        feed = Feed([Shape(4, 1, 6), Shape(2, 2, 9)], number_fill, num_workers, 2, seed=(9,), num_slots=2)
        try:
            taken = []
            for plan in (0, 1, 0, 0, 1):
                feed.open_batch(plan)
                found, batch = feed.take()
                assert found == plan and (batch.kind_BL == plan).all()
                taken.append(batch.token_ids_BL.tolist())
            streams.append(taken)
        finally:
            feed.close()
    assert streams[0] == streams[1]
    assert len({str(batch) for batch in streams[0]}) == 5


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_dead_worker_is_an_error_and_not_a_wait():
    feed = Feed([Shape(2, 1, 4)], broken_fill, 1, 1, seed=(0,))
    try:
        feed.open_batch(0)
        with pytest.raises(InfrastructureError, match="ended with 3"):
            feed.take()
    finally:
        feed.close()


def test_stages_follow_the_clock_and_never_go_back():
    stages = (Stage(until=0.2, scenes=some_stage().scenes), Stage(scenes=some_stage().scenes))
    assert [stage_at(stages, x) for x in (0.0, 0.19, 0.2, 1.0)] == [0, 0, 1, 1]
    assert stage_at(stages, 0.0, at_least=1) == 1


def test_the_rate_warms_up_and_falls_with_time():
    config = load(PretrainConfig, RECIPE)
    peak = config.trainer.optimizer.lr
    assert rate_at(0, 0.0, config) == pytest.approx(peak / config.warmup_steps)
    assert rate_at(10_000, 0.0, config) == pytest.approx(peak)
    assert rate_at(10_000, 0.5, config) == pytest.approx(peak * (1 + config.final_rate) / 2)
    assert rate_at(10_000, 1.0, config) == pytest.approx(peak * config.final_rate)


def test_a_batch_that_does_not_divide_over_ranks_and_chunks_is_refused():
    with pytest.raises(ConfigError, match="batch_screens 100 must be a multiple"):
        load(PretrainConfig, RECIPE, ["batch_screens=100"])
    with pytest.raises(ConfigError, match="parallel: pretraining runs with dp and tp only"):
        load(PretrainConfig, RECIPE, ["trainer.parallel.pp=2"])


def test_the_gate_counts_a_hit_only_inside_the_box():
    question = Question("point_color", "red one", "500 500", box=(300, 180, 340, 204))
    assert pointing.is_right(question, "500 500\n")
    assert pointing.is_right(question, "500, 500")
    assert not pointing.is_right(question, "440 500")
    assert not pointing.is_right(question, "red")
    assert not pointing.is_right(question, "9999 500")
    assert pointing.is_right(Question("theme", "theme", "dark"), " dark")


def test_wilson_gives_the_textbook_interval():
    low, high = pointing.wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3))


def test_chance_of_six_buttons_is_one_in_six():
    test = next(t for t in pointing.TESTS if t.name == "six buttons by colour")
    assert pointing.chance_of(pointing.draw(test, 6)) == pytest.approx(1 / 6)
