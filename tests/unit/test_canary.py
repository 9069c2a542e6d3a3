"""The canary: fixed prompts, gaps by kind, and a run that stops with a report when engine and trainer differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from rollout.engines.client import Generation
from slime_cua.core.errors import EngineError
from slime_cua.core.types import TrainSample
from slime_cua.launch.canary import Images, Prompt, Tolerance, canary_prompts, compare, judge, spelled_prompt

MODEL = Path("models/tiny_base")
IMAGE_TOKEN = 7


@pytest.fixture
def prompts() -> list[Prompt]:
    return canary_prompts(MODEL, IMAGE_TOKEN, num=4)


def answers(prompts: Sequence[Prompt]) -> list[Generation]:
    """Three tokens each, log-probs that tell prompt and place."""
    return [
        Generation((30, 31, 32), (-1.0 - i, -2.0 - i, -3.0 - i), (5, 5, 5), "length", 10, 0)
        for i, _ in enumerate(prompts)
    ]


def off_by(text: float, image: float, seen: list[TrainSample] | None = None):
    """A trainer whose log-probs differ from the engine's by these amounts."""

    def run(samples: Sequence[TrainSample], images: Images) -> list[list[float]]:
        if seen is not None:
            seen.extend(samples)
        found = []
        for index, sample in enumerate(samples):
            for ref in sample.segment.images:
                assert images.get(ref).startswith(b"\x89PNG")
            error = image if sample.segment.images else text
            found.append([-1.0 - index + error, -2.0 - index - error, -3.0 - index + error])
        return found

    return run


def test_prompts_are_the_same_every_time_and_half_of_them_show_a_screen(prompts: list[Prompt]) -> None:
    assert prompts == canary_prompts(MODEL, IMAGE_TOKEN, num=4)
    assert [len(p.images) for p in prompts] == [0] * 4 + [1] * 4
    assert [p.ids.count(IMAGE_TOKEN) for p in prompts] == [0] * 4 + [1] * 4
    assert len({p.images for p in prompts[4:]}) == 4


def test_half_of_the_screens_are_followed_by_a_call_that_wants_coordinates_next(
    prompts: list[Prompt],
) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ends = [tokenizer.decode(list(p.ids)).endswith('"coordinate": [') for p in prompts[4:]]
    assert ends == [False, True, False, True]


def test_the_spelled_prompt_shrinks_when_its_text_is_tokenised_again() -> None:
    spelled = spelled_prompt(MODEL, IMAGE_TOKEN)
    assert spelled is not None and spelled.ids.count(IMAGE_TOKEN) == len(spelled.images) == 1
    letters = [i for i in spelled.ids if i > IMAGE_TOKEN]
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    again = tokenizer.encode(tokenizer.decode(letters)).ids
    assert 2 * len(again) < len(letters)


def test_the_trainer_is_asked_for_exactly_the_sampled_tokens(prompts: list[Prompt]) -> None:
    seen: list[TrainSample] = []
    compare(prompts, answers(prompts), off_by(0, 0, seen))
    for prompt, sample in zip(prompts, seen, strict=True):
        segment = sample.segment
        assert segment.token_ids == (*prompt.ids, 30, 31, 32)
        assert [t for t, on in zip(segment.token_ids, segment.is_trained, strict=True) if on] == [30, 31, 32]


def test_gaps_are_judged_by_kind_and_the_report_names_the_one_that_is_off(prompts: list[Prompt]) -> None:
    gaps = compare(prompts, answers(prompts), off_by(0.01, 0.4))
    assert gaps["text"].mean == pytest.approx(0.01) and gaps["image"].mean == pytest.approx(0.4)
    assert gaps["image"].num_tokens == 12
    with pytest.raises(EngineError, match=r"image: mean 0.4000.*positions, resize"):
        judge(gaps, Tolerance(), "http://engine, version 5")
    judge(compare(prompts, answers(prompts), off_by(0.01, 0.02)), Tolerance(), "http://engine")


@pytest.mark.parametrize("text", [float("nan"), 0.06])
def test_what_is_no_number_or_beyond_the_mean_stops_the_run(text: float, prompts: list[Prompt]) -> None:
    with pytest.raises(EngineError, match="text"):
        judge(compare(prompts, answers(prompts), off_by(text, 0)), Tolerance(), "http://engine")


def test_nothing_compared_is_no_pass(prompts: list[Prompt]) -> None:
    with pytest.raises(EngineError, match="over 0 tokens"):
        judge(compare(prompts[:4], answers(prompts[:4]), off_by(0, 0)), Tolerance(), "http://engine")
