"""Sequences of generated screens with questions, equal in length: what a curriculum is, and one batch of it.

Legend: B sequences of a batch, L tokens of a sequence with images expanded, W screens of a sequence.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from slime_cua.config.base import ConfigModel
from slime_cua.synthesis import turns
from slime_cua.synthesis.questions import KINDS, Question, QuestionKind, ask
from slime_cua.synthesis.screens import SCREEN_WH_PX, make_screen
from slime_cua.synthesis.texts import Part, make_text
from slime_cua.synthesis.things import Look, between
from slime_cua.synthesis.turns import KIND_NAMES, TEXT, UNTRAINED
from slime_cua.trainer.images import PatchConfig
from slime_cua.trainer.streams import expand_streams

__all__ = ["KIND_NAMES", "TEXT", "UNTRAINED", "Batch", "Encoder", "Stage", "make_batch", "shape_of"]
SAME_SCREEN_SHARE = 0.4
"""Share of the conversations over two screens in which the second is the first again."""


class Scene(ConfigModel):
    """A kind of screen and what is asked about it."""

    share: float = Field(1.0, gt=0)
    """Weight among the scenes of a stage."""
    look: Look = Look()
    ask: dict[QuestionKind, float]
    """Weight of each kind of question."""


class Lengths(ConfigModel):
    """Lengths of a sequence in tokens, images not counted."""

    text_tokens: int = Field(124, ge=16)
    """Questions, answers and texts of one screen."""
    prefix_tokens: int = Field(40, ge=0)
    """At most this much of it is text before the first screen, so that screens stand at many places."""


class Stage(ConfigModel):
    """A part of the curriculum."""

    until: float = Field(1.0, gt=0, le=1)
    """Ends at this share of the training time at the latest."""
    leave_when: dict[str, float] = {}
    """Ends as soon as each of these held-out hit rates (names: pretrain.WATCHED) is reached; empty: by time only."""
    scenes: tuple[Scene, ...]
    lengths: Lengths = Lengths()
    two_screens_share: float = Field(0.0, ge=0, le=1)
    """Share of the batches whose sequences hold two screens, each with its questions."""
    chat_share: float = Field(0.0, ge=0, le=1)
    """Share of the sequences that are chat turns, the first question standing before its screen (`turns`)."""
    uses_of_screen: int = Field(1, ge=1)
    """Sequences of a batch that show a screen, each with other questions: drawing costs more than asking."""


@dataclass
class Batch:
    """Sequences of equal length with the same number of screens."""

    token_ids_BL: np.ndarray
    """int32, images expanded."""
    positions_3BL: np.ndarray
    """int16: rotary positions (time, row, column)."""
    kind_BL: np.ndarray
    """int8: index into KIND_NAMES of a trained token, else UNTRAINED."""
    pixels: np.ndarray
    """uint8 [B * W, height, width, 3], in the order of the sequences."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a batch."""

    num_sequences: int
    num_screens: int
    """Screens of a sequence."""
    length: int
    """Tokens of a sequence, images expanded."""

    def arrays(self) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shape and type of each array of a Batch."""
        width, height = SCREEN_WH_PX
        rows = (self.num_sequences, self.length)
        return {
            "token_ids_BL": (rows, np.int32),
            "positions_3BL": ((3, *rows), np.int16),
            "kind_BL": (rows, np.int8),
            "pixels": ((self.num_sequences * self.num_screens, height, width, 3), np.uint8),
        }

    def allocate(self) -> Batch:
        """A batch of zeros."""
        return Batch(**{name: np.zeros(shape, kind) for name, (shape, kind) in self.arrays().items()})


def shape_of(lengths: Lengths, num_sequences: int, num_screens: int, image_tokens: int) -> Shape:
    """Sizes of a batch of `num_sequences`; image_tokens: tokens of one screen."""
    return Shape(num_sequences, num_screens, num_screens * (lengths.text_tokens + 2 + image_tokens))


class Encoder:
    """Text to ids for one Hugging Face folder; reads its tokenizer.json and preprocessor_config.json."""

    def __init__(self, hf_dir: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(hf_dir / "tokenizer.json"))
        self.encode = functools.lru_cache(maxsize=1 << 16)(self._encode)
        self.image = [self._id("<|vision_start|>"), self._id("<|image_pad|>"), self._id("<|vision_end|>")]
        special = set(self._tokenizer.get_added_tokens_decoder())
        texts = (self._tokenizer.id_to_token(i) for i in range(self._tokenizer.get_vocab_size()))
        self.screen_grid = PatchConfig.from_hf(hf_dir).token_grid(*SCREEN_WH_PX)
        """(rows, columns) of image tokens of a screen."""
        named = {i: text for i, text in enumerate(texts) if text and i not in special}
        self.plain_ids = np.array(list(named))
        """Tokens that are no marks."""
        self.words = tuple(text for text in named.values() if re.fullmatch("[a-z]{2,}", text))
        """Lower-case words that are one token."""

    def _id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no {token}; a vision-language tokenizer is needed")
        return int(found)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def part(self, part: Part) -> list[int]:
        return list(self.encode(part)) if isinstance(part, str) else part


def make_batch(rng: np.random.Generator, stage: Stage, encoder: Encoder, batch: Batch) -> None:
    """Fill `batch` with random sequences; the same state of `rng` gives the same ones."""
    num_sequences = len(batch.token_ids_BL)
    num_screens = len(batch.pixels) // num_sequences
    drawn: list[tuple[Scene, turns.Scene]] = []
    for row in range(num_sequences):
        if row % stage.uses_of_screen == 0:
            drawn = [_draw_scene(rng, stage) for _ in range(num_screens)]
        scenes = [scene for _, scene in drawn]
        for plan, scene in drawn:
            scene.questions = ask(scene.screen, rng, plan.ask, 12, scene.known)
        if rng.random() < stage.chat_share:
            if num_screens == 2 and rng.random() < SAME_SCREEN_SHARE:
                scenes = [scenes[0], scenes[0]]
            tokens = _conversation(rng, scenes, stage.lengths, encoder)
        else:
            tokens = _sequence(rng, scenes, stage.lengths, encoder)
        streams = expand_streams(
            np.array(tokens.ids, np.int64),
            np.array([len(tokens.ids)]),
            np.array([encoder.screen_grid] * num_screens),
            encoder.image[1],
        )
        batch.token_ids_BL[row] = streams.token_ids_T
        batch.positions_3BL[:, row] = streams.positions_3T
        batch.kind_BL[row] = UNTRAINED
        batch.kind_BL[row, streams.start_N] = tokens.kinds
        for at, scene in enumerate(scenes):
            batch.pixels[row * num_screens + at] = scene.screen.pixels


def _draw_scene(rng: np.random.Generator, stage: Stage) -> tuple[Scene, turns.Scene]:
    shares = np.cumsum([scene.share for scene in stage.scenes])
    scene = stage.scenes[int(np.searchsorted(shares, rng.random() * shares[-1], side="right"))]
    return scene, turns.Scene(make_screen(rng, scene.look), [])


def _conversation(
    rng: np.random.Generator, scenes: list[turns.Scene], lengths: Lengths, encoder: Encoder
) -> turns.Tokens:
    """Chat turns of exactly len(scenes) * (text_tokens + 3) tokens: texts fill what is left, in front."""
    length = len(scenes) * (lengths.text_tokens + 3)
    talk = turns.chat(rng, scenes, length - between(rng, 0, lengths.prefix_tokens), encoder)
    text_ids, text_kinds = _texts(rng, length - len(talk.ids), encoder)
    return turns.Tokens(text_ids + talk.ids, text_kinds + talk.kinds)


def _sequence(
    rng: np.random.Generator, scenes: list[turns.Scene], lengths: Lengths, encoder: Encoder
) -> turns.Tokens:
    """Ids and kinds of exactly len(scenes) * (text_tokens + 3) tokens: text, then each screen with its questions."""
    room = len(scenes) * lengths.text_tokens - between(rng, 0, lengths.prefix_tokens)
    ids: list[int] = []
    kinds: list[int] = []
    for number, scene in enumerate(scenes):
        share = room // (len(scenes) - number)
        used = 0
        ids += encoder.image
        kinds += [UNTRAINED] * 3
        for question in scene.questions:
            opening, answer = _question_ids(rng, question, encoder)
            if used + len(opening) + len(answer) > share:
                continue
            ids += opening + answer
            kinds += [UNTRAINED] * len(opening) + [KINDS.index(question.kind)] * len(answer)
            used += len(opening) + len(answer)
        room -= used
    missing = len(scenes) * (lengths.text_tokens + 3) - len(ids)
    text_ids, text_kinds = _texts(rng, missing, encoder)
    return turns.Tokens(text_ids + ids, text_kinds + kinds)


def _question_ids(
    rng: np.random.Generator, question: Question, encoder: Encoder
) -> tuple[list[int], list[int]]:
    answer = question.answer
    if question.box is not None and rng.random() < 0.5:
        answer = answer.replace(" ", ", ")
    return list(encoder.encode(question.opening(rng))), list(encoder.encode(answer + "\n"))


def _texts(rng: np.random.Generator, num_tokens: int, encoder: Encoder) -> tuple[list[int], list[int]]:
    """Texts that fill `num_tokens` exactly; the first one is cut and then not trained."""
    ids: list[int] = []
    kinds: list[int] = []
    while len(ids) < num_tokens:
        opening, ending = (encoder.part(part) for part in make_text(rng, encoder.plain_ids, encoder.words))
        end = list(encoder.encode("\n"))
        is_whole = len(opening) + len(ending) + len(end) + len(ids) <= num_tokens
        ids = opening + ending + end + ids
        trained = [TEXT if is_whole else UNTRAINED] * (len(ending) + len(end))
        kinds = [UNTRAINED] * len(opening) + trained + kinds
    cut = len(ids) - num_tokens
    return ids[cut:], kinds[cut:]
