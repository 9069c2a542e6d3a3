"""Do engine and trainer compute the same policy? Fixed prompts and screenshots, asked at the start and every N updates.

The engine answers them; the trainer computes the log-probs of the same answers under the same weights. What is left is the
numeric noise of two implementations, unless one of them computes something else: positions of image tokens, a resize, a stale
weight. Text alone and image-conditioned coordinates are judged apart, because such faults show in one of them only.

Before that each engine gets a prompt that no tokenizer would write: an engine that decodes and tokenises again counts it
otherwise and is refused.
"""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from PIL import Image, ImageDraw
from tokenizers import Tokenizer

from rollout.engines.client import EngineClient, Generation, image_ref
from slime_cua.config.rollout import CanaryConfig, SamplingConfig
from slime_cua.core.errors import EngineError, PromptMismatchError
from slime_cua.core.types import NOT_SAMPLED, ImageRef, Segment, TrainSample
from slime_cua.data.expand import ImageProcessorConfig

Kind = Literal["text", "image"]
SIZE_WH_PX = (640, 384)
_COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 200, 40)}
_SPELLED = "press the button and close the window"
_CALL = '{"action": "left_click", "coordinate": ['
_TEXTS = ("point ", "press the button, then ", "the file was ", _CALL)


class Images(Protocol):
    """Bytes of an image by its reference: what the trainer reads screenshots from."""

    def get(self, ref: ImageRef) -> bytes: ...


TrainerLogprobs = Callable[[Sequence[TrainSample], Images], Sequence[Sequence[float]]]
"""Log-probs of each sample's trained tokens under the trainer's current weights, at temperature 1."""


class CanaryError(EngineError):
    """An engine computes another policy than the trainer: the run must end."""


@dataclass(frozen=True)
class Tolerance:
    """Largest |log-prob engine - log-prob trainer|, nats, that two right implementations may show.

    The defaults are for bf16 on both sides: twice the mean that a run must hold (0.025), half again its p99 (0.2), because
    the canary has few tokens.
    """

    mean: float = 0.05
    p99: float = 0.3


@dataclass(frozen=True)
class Prompt:
    """Rollout ids, one placeholder an image, and the PNGs."""

    kind: Kind
    ids: tuple[int, ...]
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Gap:
    """|log-prob engine - log-prob trainer| over the tokens of one kind of prompt, nats."""

    num_tokens: int
    mean: float
    p99: float
    max: float

    def is_within(self, tolerance: Tolerance) -> bool:
        """False also when it is not a number, or nothing was compared."""
        return self.num_tokens > 0 and self.mean <= tolerance.mean and self.p99 <= tolerance.p99


def canary_prompts(hf_dir: Path, image_token_id: int, num: int = 16) -> list[Prompt]:
    """`num` prompts with text alone and `num` that ask for a place on a screen, the same every time.

    Of the latter, every other one has begun the call already: whatever its model is used to, coordinates come next.
    """
    tokenizer = Tokenizer.from_file(str(hf_dir / "tokenizer.json"))
    start, end = (tokenizer.token_to_id(f"<|vision_{side}|>") for side in ("start", "end"))
    prompts = [
        Prompt("text", tuple(tokenizer.encode(_TEXTS[i % len(_TEXTS)] * (1 + i // 4)).ids))
        for i in range(num)
    ]
    for index in range(num):
        color, png = _screen(index)
        question = tokenizer.encode(f"point {color} one: {_CALL if index % 2 else ''}").ids
        marked = [token for token in (start, image_token_id, end) if token is not None]
        ids = [*marked, *question]
        prompts.append(Prompt("image", tuple(ids), (png,)))
    return prompts


def spelled_prompt(hf_dir: Path, image_token_id: int) -> Prompt | None:
    """A screen and a sentence spelled letter by letter: tokenised again, it has another length.

    SGLang tokenises again only where there is an image. None for a tokenizer that knows letters alone.
    """
    tokenizer = Tokenizer.from_file(str(hf_dir / "tokenizer.json"))
    ids = [token for letter in _SPELLED for token in tokenizer.encode(letter, add_special_tokens=False).ids]
    again = tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=False), add_special_tokens=False).ids
    if len(again) == len(ids):
        return None
    marks = (
        tokenizer.token_to_id("<|vision_start|>"),
        image_token_id,
        tokenizer.token_to_id("<|vision_end|>"),
    )
    return Prompt("image", (*(mark for mark in marks if mark is not None), *ids), (_screen(0)[1],))


async def sample(
    client: EngineClient, prompts: Sequence[Prompt], max_new_tokens: int = 16, session: str = "canary"
) -> list[Generation]:
    """The engine's answers at temperature 1, one seed a prompt. Every session goes to one engine. Raises EngineError."""
    sampling = SamplingConfig(temperature=1.0, max_response_tokens=max_new_tokens)
    calls = [
        client.generate(prompt.ids, prompt.images, sampling, session=session, seed=index)
        for index, prompt in enumerate(prompts)
    ]
    return [client.without_placeholder(answer) for answer in await asyncio.gather(*calls)]


def compare(
    prompts: Sequence[Prompt], answers: Sequence[Generation], trainer_logprobs: TrainerLogprobs
) -> dict[Kind, Gap]:
    """The gap by kind of prompt. Answers without a token say nothing."""
    pairs = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if answer.ids]
    theirs = trainer_logprobs([_train_sample(i, *pair) for i, pair in enumerate(pairs)], _Held(prompts))
    found: dict[Kind, list[float]] = {"text": [], "image": []}
    for (prompt, answer), logp in zip(pairs, theirs, strict=True):
        found[prompt.kind] += [abs(a - b) for a, b in zip(answer.logp, logp, strict=True)]
    return {kind: _gap(values) for kind, values in found.items()}


def judge(gaps: dict[Kind, Gap], tolerance: Tolerance, where: str) -> None:
    """Raises CanaryError, the report of the stopped run, when a gap is beyond `tolerance`. `where`: engine and version."""
    wrong = [kind for kind, gap in gaps.items() if not gap.is_within(tolerance)]
    if not wrong:
        return
    lines = [
        f"{kind}: mean {gap.mean:.4f}, p99 {gap.p99:.4f}, max {gap.max:.4f} over {gap.num_tokens} tokens"
        for kind, gap in gaps.items()
    ]
    hint = "look at weights, dtype and temperature"
    if wrong == ["image"]:
        hint = "text agrees: look at positions, resize and order of images"
    raise CanaryError(
        f"canary: {where} computes another policy than the trainer (allowed: mean {tolerance.mean}, p99 "
        f"{tolerance.p99} nats). {'; '.join(lines)}. {hint}. The run stops: its gradients would be wrong"
    )


class Canary:
    """The checks of a run: before its first episode, then once `every` updates were published since the last."""

    def __init__(self, config: CanaryConfig, hf_dir: Path, *, timeout_s: float) -> None:
        """timeout_s: of the answers of one engine."""
        self._config, self._hf_dir, self._timeout_s = config, hf_dir, timeout_s
        self._tolerance = Tolerance(config.max_mean_gap, config.max_p99_gap)
        self._checked: int | None = None

    def is_due(self, version: int) -> bool:
        every = self._config.every
        return every > 0 and (self._checked is None or version >= self._checked + every)

    def check(self, urls: Sequence[str], version: int, trainer_logprobs: TrainerLogprobs) -> dict[Kind, Gap]:
        """The worst gap of each kind over the engines at `urls`, which all serve `version`.

        Raises CanaryError when one is beyond the tolerance or counts a prompt otherwise than we do, and EngineError when an
        engine does not answer: then the check stays due.
        """
        processor = ImageProcessorConfig.from_hf(self._hf_dir)
        prompts = canary_prompts(self._hf_dir, processor.image_token_id, self._config.num_prompts)
        try:
            answers = asyncio.run(self._answers(urls, version, processor, prompts))
        except PromptMismatchError as error:
            raise CanaryError(
                f"canary: {error}. The run stops: it would train on what no engine saw"
            ) from error
        worst: dict[Kind, Gap] = {}
        for url, answer in zip(urls, answers, strict=True):
            gaps = compare(prompts, answer, trainer_logprobs)
            judge(gaps, self._tolerance, f"{url}, version {version},")
            worst = {kind: max(gap, worst.get(kind, gap), key=lambda g: g.mean) for kind, gap in gaps.items()}
        self._checked = version
        return worst

    async def _answers(
        self, urls: Sequence[str], version: int, processor: ImageProcessorConfig, prompts: Sequence[Prompt]
    ) -> list[list[Generation]]:
        spelled = spelled_prompt(self._hf_dir, processor.image_token_id)

        async def ask(url: str) -> list[Generation]:
            async with EngineClient([url], processor, request_timeout_s=self._timeout_s) as client:
                client.set_engines([url], version)
                try:
                    if spelled is not None:
                        await sample(client, [spelled], max_new_tokens=1)
                    return await sample(client, prompts)
                except PromptMismatchError as error:
                    raise PromptMismatchError(f"{url}: {error}") from error

        return list(await asyncio.gather(*map(ask, urls)))


class _Held:
    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._bytes = {image_ref(png).sha256: png for prompt in prompts for png in prompt.images}

    def get(self, ref: ImageRef) -> bytes:
        return self._bytes[ref.sha256]


def _train_sample(index: int, prompt: Prompt, answer: Generation) -> TrainSample:
    before, after = len(prompt.ids), len(answer.ids)
    segment = Segment(
        segment_id=f"canary-{index}",
        episode_id=f"canary-{index}",
        group_id="canary",
        task_id="canary",
        token_ids=(*prompt.ids, *answer.ids),
        is_trained=(False,) * before + (True,) * after,
        logp=(0.0,) * before + answer.logp,
        versions=(NOT_SAMPLED,) * before + answer.versions,
        step_of_token=(NOT_SAMPLED,) * before + (0,) * after,
        step_types=("gui",),
        images=tuple(image_ref(png) for png in prompt.images),
    )
    return TrainSample(segment=segment)


def _gap(values: Sequence[float]) -> Gap:
    if not values:
        return Gap(0, math.nan, math.nan, math.nan)
    array = np.array(values)
    return Gap(len(values), float(array.mean()), float(np.quantile(array, 0.99)), float(array.max()))


def _screen(index: int) -> tuple[str, bytes]:
    """A grey screen with one square of each colour at places drawn from `index`; the colour asked for."""
    rng = np.random.default_rng(index)
    width, height = SIZE_WH_PX
    image = Image.new("RGB", SIZE_WH_PX, (210, 210, 215))
    draw = ImageDraw.Draw(image)
    cells = rng.permutation(12)[: len(_COLORS)]
    for color, cell in zip(_COLORS.values(), cells, strict=True):
        left = int(cell) % 4 * (width // 4) + int(rng.integers(0, 60))
        top = int(cell) // 4 * (height // 3) + int(rng.integers(0, 40))
        draw.rectangle((left, top, left + 80, top + 70), fill=color)
    file = io.BytesIO()
    image.save(file, "png")
    return list(_COLORS)[index % len(_COLORS)], file.getvalue()
