"""Chat turns about generated screens: what is asked for stands before the screen, and more may be asked after it.

    user: point red one, then say the color of the circle <screen>     assistant: 480 260\nprint('blue')

Over two screens a request goes on: its first part is answered at the first screen, its second at the next ("done" when
nothing is left), or, after "each time: ", the same part at both. No action and no task occurs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from slime_cua.synthesis.questions import KINDS, Question, QuestionKind, candidates
from slime_cua.synthesis.screens import Screen
from slime_cua.synthesis.snippets import SEEN_KINDS, draw_snippet, fill_in
from slime_cua.synthesis.things import between, pick

if TYPE_CHECKING:
    from slime_cua.synthesis.pretrain_data import Encoder

UNTRAINED = -1
TEXT, CARRY, FILL, DONE = (len(KINDS) + i for i in range(4))
"""Kinds of trained tokens that are no question's: texts without a screen; words of a request carried past a screen; the
same with something seen; nothing left to do."""
KIND_NAMES = (*KINDS, "text", "carry", "fill", "done")

CARRY_SHARE = 0.25
"""Share of the requests whose answer needs no screen."""
FILL_SHARE = 0.4
"""Share of the questions that could be filled into a snippet that are."""
SYSTEM_SHARE = 0.7
FOLLOW_SHARE = 0.3
"""How often another question comes before the next screen."""

Part = tuple[str, str, int]
"""Request, answer, kind."""


@dataclass
class Scene:
    """A screen, the questions to ask about it, and all that could be asked, as far as it was found."""

    screen: Screen
    questions: list[Question]
    known: dict[QuestionKind, list[Question]] = field(default_factory=dict)


@dataclass
class Tokens:
    """Ids with one placeholder an image, and the kind of each."""

    ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def add(self, ids: tuple[int, ...] | list[int], kind: int = UNTRAINED) -> None:
        self.ids += ids
        self.kinds += [kind] * len(ids)


def chat(rng: np.random.Generator, scenes: list[Scene], room: int, encoder: Encoder) -> Tokens:
    """A conversation about `scenes`, of at most `room` tokens; an image counts as three."""
    tokens = Tokens()
    if rng.random() < SYSTEM_SHARE:
        names = " ".join(pick(rng, encoder.words) for _ in range(between(rng, 1, 4)))
        tokens.add(encoder.encode(f"<|im_start|>system\n{names}<|im_end|>\n"))
    pending = [list(scene.questions) for scene in scenes]
    request, answers = _plan(rng, scenes, pending, encoder, (room - len(tokens.ids)) // len(scenes))
    for number, answer in enumerate(answers):
        _turn(tokens, encoder, request if number == 0 else "", answer, has_image=True)
        later = (len(scenes) - number - 1) * 40
        is_last = number == len(scenes) - 1
        while pending[number] and (is_last or rng.random() < FOLLOW_SHARE):
            part = _part(rng, pending[number].pop(), encoder)
            turn = Tokens()
            _turn(turn, encoder, part[0], [part], has_image=False)
            if len(tokens.ids) + len(turn.ids) > room - later:
                break
            tokens.add(turn.ids)
            tokens.kinds[-len(turn.ids) :] = turn.kinds
    return tokens


def _plan(
    rng: np.random.Generator, scenes: list[Scene], pending: list[list[Question]], encoder: Encoder, room: int
) -> tuple[str, list[list[Part]]]:
    """(request of the first turn, what each turn answers). Questions that are used leave `pending`."""
    joint = pick(rng, (", then ", ". ", ", ", " and then "))
    if len(scenes) == 1:
        parts: list[Part] = []
        for _ in range(pick(rng, (1, 1, 1, 2, 2, 3))):
            part = _next(rng, pending[0], encoder)
            if parts and sum(_cost(encoder, p) for p in (*parts, part)) > room - 24:
                break
            parts.append(part)
        return joint.join(request for request, _, _ in parts), [parts]
    turn = rng.random()
    first_question = pending[0][-1] if pending[0] else None
    first = _next(rng, pending[0], encoder)
    if turn < 0.3 and first_question is not None:
        again = _same(scenes[1], first_question)
        if again is not None and first[2] == KINDS.index(first_question.kind):
            second = (first[0], _answer(rng, again), first[2])
            return f"each time: {first[0]}", [[first], [second]]
    if turn < 0.5:
        return first[0], [[first], [("", "done", DONE)]]
    second = _next(rng, pending[1], encoder)
    return joint.join((first[0], second[0])), [[first], [second]]


def _next(rng: np.random.Generator, pending: list[Question], encoder: Encoder) -> Part:
    if not pending or rng.random() < CARRY_SHARE:
        return (*draw_snippet(rng, encoder.words), CARRY)
    return _part(rng, pending.pop(), encoder)


def _part(rng: np.random.Generator, question: Question, encoder: Encoder) -> Part:
    if question.kind in SEEN_KINDS and rng.random() < FILL_SHARE:
        return (*fill_in(rng, question, encoder.words), FILL)
    return question.opening(rng).removesuffix(": "), _answer(rng, question), KINDS.index(question.kind)


def _answer(rng: np.random.Generator, question: Question) -> str:
    if question.box is not None and rng.random() < 0.5:
        return question.answer.replace(" ", ", ")
    return question.answer


def _same(scene: Scene, question: Question) -> Question | None:
    """The same question about another screen, if it has an answer there."""
    if question.kind not in scene.known:
        scene.known[question.kind] = candidates(scene.screen, question.kind)
    return next((other for other in scene.known[question.kind] if other.about == question.about), None)


def _cost(encoder: Encoder, part: Part) -> int:
    return len(encoder.encode(part[0])) + len(encoder.encode(part[1])) + 3


def _turn(tokens: Tokens, encoder: Encoder, request: str, answers: list[Part], has_image: bool) -> None:
    """One user turn and the assistant's answer; the end of the turn is trained, too."""
    tokens.add(encoder.encode(f"<|im_start|>user\n{request}"))
    if has_image:
        tokens.add(encoder.image)
    tokens.add(encoder.encode("<|im_end|>\n<|im_start|>assistant\n"))
    for number, (_, answer, kind) in enumerate(answers):
        end = "\n" if number < len(answers) - 1 else "<|im_end|>"
        tokens.add(encoder.encode(answer + end), kind)
    tokens.add(encoder.encode("\n"))
