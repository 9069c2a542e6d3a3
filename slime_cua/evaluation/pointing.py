"""The gate of a base policy: does it see and point on screens that it was never shown?

    python -m slime_cua.evaluation.pointing models/tiny_base

Screens come from the generator of pretraining under seeds that training never uses. Each question is asked alone, answered
greedily, and judged: a point must lie in the box of what was asked for, any other answer must be the right text. Beside
each rate stand chance and the rate on the same questions with the image blanked.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime_cua.core.coordinates import Point, to_pixels
from slime_cua.core.errors import CheckpointError
from slime_cua.synthesis.questions import KINDS, POINT_KINDS, Question, QuestionKind, candidates
from slime_cua.synthesis.screens import SCREEN_WH_PX, Screen, make_screen
from slime_cua.synthesis.things import Look, pick

HELDOUT_SEED = 1_000_003
"""First seed of the gate; training seeds are smaller."""
BLANK_LEVEL = 128
MAX_ANSWER_TOKENS = 5

SIX_COLORS = Look(
    num_items=(6, 6), side_px=(40, 160), kinds=("button",), are_colors_distinct=True, window_share=0.5
)
"""Six buttons, one of each colour: chance is one in six."""
ONE_COLOR = Look(num_items=(1, 1), kinds=("button", "circle", "square", "triangle", "cross"))
MIXED = Look(num_items=(2, 8))
READING = Look(num_items=(2, 6), side_px=(40, 200), kinds=("button",), word_share=1.0)
FORM = Look(
    num_items=(2, 4), side_px=(90, 300), kinds=("field",), word_share=1.0, number_share=0.5, label_share=1.0
)


CHAT_KINDS: tuple[QuestionKind, ...] = ("point_shape", "point_both", "point_place", "tell_color", "count")


@dataclass(frozen=True)
class Test:
    """One line of the gate's table."""

    name: str
    kind: QuestionKind
    look: Look
    is_chat: bool = False
    """Asked in a chat turn, before its screen."""


TESTS: tuple[Test, ...] = (
    Test("one thing by colour", "point_color", ONE_COLOR),
    Test("six buttons by colour", "point_color", SIX_COLORS),
    Test("reading: button by word", "point_word", READING),
    *(Test(f"mixed: {kind}", kind, MIXED) for kind in KINDS if kind not in ("value", "absent")),
    Test("form: value", "value", FORM),
    *(Test(f"chat: {kind}", kind, MIXED, True) for kind in CHAT_KINDS),
    Test("chat: six buttons by colour", "point_color", SIX_COLORS, True),
)


@dataclass(frozen=True)
class Asked:
    """A question about a screen."""

    screen: Screen
    question: Question
    is_chat: bool = False


@dataclass(frozen=True)
class Result:
    """A line of the table. Rates are shares of `num`; the interval is Wilson's, 95 %."""

    name: str
    num: int
    rate: float
    low: float
    high: float
    chance: float
    """Pointing: one of the things that could be meant, taken at random. Else: the commonest answer of the test."""
    blank: float | None
    """Rate with the image blanked; None if not measured."""


def wilson(hits: int, num: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a rate. Source: Wilson (1927), score interval."""
    if num == 0:
        return 0.0, 1.0
    p = hits / num
    middle = (p + z * z / (2 * num)) / (1 + z * z / num)
    half = z * math.sqrt(p * (1 - p) / num + z * z / (4 * num * num)) / (1 + z * z / num)
    return max(0.0, middle - half), min(1.0, middle + half)


def draw(test: Test, num: int, seed: int = HELDOUT_SEED) -> list[Asked]:
    """`num` questions on as many screens; answers of yes, no and numbers are as frequent as the generator gives them."""
    asked: list[Asked] = []
    attempt = 0
    while len(asked) < num and attempt < 200 * num:
        rng = np.random.default_rng([seed, attempt])
        attempt += 1
        screen = make_screen(rng, test.look)
        found = candidates(screen, test.kind)
        if found:
            asked.append(Asked(screen, pick(rng, tuple(found)), test.is_chat))
    return asked


def is_right(question: Question, answer: str) -> bool:
    """Whether `answer` hits the box, or is the right text."""
    text = answer.strip()
    if question.box is None:
        return text == question.answer
    numbers = re.fullmatch(r"(\d{1,4}),? (\d{1,4})", text)
    if not numbers or max(int(part) for part in numbers.groups()) > 1000:
        return False
    x, y = to_pixels(Point(x=int(numbers[1]), y=int(numbers[2])), SCREEN_WH_PX)
    x0, y0, x1, y1 = question.box
    return x0 <= x < x1 and y0 <= y < y1


def chance_of(asked: Sequence[Asked]) -> float:
    """Rate of a policy that cannot tell the things shown apart (pointing), or always gives the commonest answer."""
    if asked and asked[0].question.kind in POINT_KINDS:
        return float(np.mean([_random_hit(one) for one in asked]))
    answers = Counter(one.question.answer for one in asked)
    return max(answers.values()) / max(len(asked), 1)


def _random_hit(one: Asked) -> float:
    """Chance of one of the things that could be meant: those with a word where a word is asked for, boxes where a box is,
    else all; of any place on the screen where what is asked for is no thing or the only one."""
    question = one.question
    items = one.screen.items
    if question.kind == "point_word":
        items = [item for item in items if item.word]
    elif question.kind == "point_box":
        items = [item for item in items if item.kind == "box"]
    if len(one.screen.items) > 1 and any(item.box == question.box for item in items):
        return 1 / len(items)
    x0, y0, x1, y1 = question.box or (0, 0, 0, 0)
    return (x1 - x0) * (y1 - y0) / (SCREEN_WH_PX[0] * SCREEN_WH_PX[1])


class Answerer:
    """Answers questions greedily with a Hugging Face folder in transformers."""

    def __init__(self, hf_dir: Path, device: str = "cpu", batch_size: int = 16) -> None:
        import torch
        from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration

        if not (hf_dir / "model.safetensors").is_file():
            raise CheckpointError(
                f"{hf_dir} has no model.safetensors: make it with recipes/pretrain_tiny_base.sh"
            )
        self._torch, self._device, self._batch_size = torch, device, batch_size
        self._tokenizer = AutoTokenizer.from_pretrained(str(hf_dir))
        model: Any = Qwen3_5ForConditionalGeneration.from_pretrained(str(hf_dir), dtype=torch.float32)
        self._model = model.to(device).eval()
        self._processor = _patch_config(hf_dir)

    def answer(self, asked: Sequence[Asked], is_blank: bool = False) -> list[str]:
        """The text after each question, up to the end of its line."""
        prompts = [self._prompt(one) for one in asked]
        answers = [""] * len(asked)
        by_length: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(index)
        for indices in by_length.values():
            for start in range(0, len(indices), self._batch_size):
                some = indices[start : start + self._batch_size]
                pixels = np.stack([asked[i].screen.pixels for i in some])
                pixels = np.full_like(pixels, BLANK_LEVEL) if is_blank else pixels
                for i, text in zip(some, self._generate([prompts[i] for i in some], pixels), strict=True):
                    answers[i] = text
        return answers

    def _prompt(self, one: Asked) -> list[int]:
        width, height = SCREEN_WH_PX
        rows, columns = self._processor.token_grid(width, height)
        image = "<|vision_start|>" + "<|image_pad|>" * (rows * columns) + "<|vision_end|>"
        text = image + one.question.opening()
        if one.is_chat:
            request = one.question.opening().removesuffix(": ")
            text = f"<|im_start|>user\n{request}{image}<|im_end|>\n<|im_start|>assistant\n"
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _generate(self, prompts: list[list[int]], pixels: np.ndarray) -> list[str]:
        from slime_cua.trainer.images import patchify

        torch = self._torch
        ids = torch.tensor(prompts, device=self._device)
        rows, columns = self._processor.grid_hw(*SCREEN_WH_PX)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == self._model.config.image_token_id).int(),
                pixel_values=patchify(torch.from_numpy(pixels).to(self._device), self._processor),
                image_grid_thw=torch.tensor([[1, rows, columns]] * len(prompts), device=self._device),
                max_new_tokens=MAX_ANSWER_TOKENS,
                do_sample=False,
                eos_token_id=self._tokenizer.encode("\n<|im_end|>", add_special_tokens=False),
                pad_token_id=self._tokenizer.pad_token_id,
            )
        texts: list[str] = self._tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
        return [text.split("\n")[0] for text in texts]


def _patch_config(hf_dir: Path) -> Any:
    from slime_cua.trainer.images import PatchConfig

    return PatchConfig.from_hf(hf_dir)


def measure(answerer: Answerer, test: Test, num: int, num_blank: int = 0, seed: int = HELDOUT_SEED) -> Result:
    """One line of the table from `num` questions, the first `num_blank` of them with blanked images, too."""
    asked = draw(test, num, seed)
    hits = _hits(asked, answerer.answer(asked))
    blank = None
    if num_blank:
        some = asked[:num_blank]
        blank = _hits(some, answerer.answer(some, is_blank=True)) / len(some)
    low, high = wilson(hits, len(asked))
    return Result(test.name, len(asked), hits / len(asked), low, high, chance_of(asked), blank)


def _hits(asked: Sequence[Asked], answers: Sequence[str]) -> int:
    return sum(is_right(one.question, text) for one, text in zip(asked, answers, strict=True))


def table(results: Sequence[Result]) -> str:
    """The results as a Markdown table."""
    lines = ["| asked | n | rate | 95 % interval | chance | image blanked |", "|---|---|---|---|---|---|"]
    for r in results:
        blank = "-" if r.blank is None else f"{r.blank:.3f}"
        lines.append(
            f"| {r.name} | {r.num} | {r.rate:.3f} | {r.low:.3f} to {r.high:.3f} | {r.chance:.3f} | {blank} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Gate a base policy on generated screens that it was never shown."
    )
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--num", type=int, default=400, help="questions a line of the table")
    parser.add_argument("--num-blank", type=int, default=200, help="of these also with blanked images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    given = parser.parse_args(arguments)
    answerer = Answerer(given.model, given.device, given.batch_size)
    results = []
    for test in TESTS:
        results.append(measure(answerer, test, given.num, given.num_blank))
        print(table(results).splitlines()[-1], flush=True)
    print("\n" + table(results))
    if given.json:
        given.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
