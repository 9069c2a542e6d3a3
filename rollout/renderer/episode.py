"""The running token stream of one episode: what the policy is asked, and the context fields of each Turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.actions import ActionSpace
from rollout.context import ContextPolicy, Seen, next_view
from rollout.renderer.renderer import Piece, Renderer
from slime_cua.core.types import ImageRef, Observation, StepType, Turn


@dataclass(frozen=True)
class Prompt:
    """One request: the whole stream, and the part of it that is new since the last answer."""

    ids: tuple[int, ...]
    """Rollout ids, one placeholder an image, from the start of the segment."""
    images: tuple[ImageRef, ...]
    """Of the placeholders, in order."""
    context_ids: tuple[int, ...]
    context_images: tuple[ImageRef, ...]
    starts_segment: bool
    num_tokens: int
    """Length after expansion: the prompt_tokens that the engine must report (I1)."""


@dataclass
class _Stream:
    ids: list[int] = field(default_factory=list)
    images: list[ImageRef] = field(default_factory=list)

    def append(self, piece: Piece) -> None:
        self.ids.extend(piece.ids)
        self.images.extend(piece.images)


class EpisodeRenderer:
    """start(task, screenshot), then in turn: prompt() -> engine -> add_response(ids) -> add_observation(...).

    Answers enter the stream as the ids that were sampled. When the context policy takes a screenshot away, or the template
    changes earlier answers, the stream is written anew: `starts_segment` is then true and the whole prompt is context.
    """

    def __init__(self, renderer: Renderer, policy: ContextPolicy) -> None:
        self._renderer, self._policy = renderer, policy
        self._instruction = ""
        self._observations: list[Observation] = []
        self._answers: list[tuple[int, ...]] = []
        self._seen: list[Seen] = []
        self._in_view: tuple[int, ...] = ()
        self._stream = _Stream()
        self._pending = Piece(())
        self._starts_segment = True

    def start(self, instruction: str, observation: Observation | ImageRef) -> None:
        """Begin an episode; what an earlier one left is forgotten."""
        first = _observation(observation)
        self._instruction = instruction
        self._observations, self._seen = [first], [Seen(image_sha256=_hash(first))]
        self._answers, self._stream, self._starts_segment = [], _Stream(), True
        self._in_view = next_view(self._policy, self._seen, ()).in_view
        self._pending = self._renderer.start(instruction, first, is_shown=0 in self._in_view)

    @property
    def space(self) -> ActionSpace:
        """What the answers are read by: the actions and tools that the prompt offers."""
        return self._renderer.space

    @property
    def in_view(self) -> tuple[int, ...]:
        """Positions of the observations whose screenshots the next prompt shows."""
        return self._in_view

    @property
    def num_tokens(self) -> int:
        """Expanded length of the stream so far, the next prompt's context included."""
        ids = (*self._stream.ids, *self._pending.ids)
        return self._renderer.num_prompt_tokens(ids, (*self._stream.images, *self._pending.images))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer, for the action parser."""
        return self._renderer.text_of_ids(ids)

    def prompt(self) -> Prompt:
        """The next request. Raises RuntimeError before start() and while the last answer waits for its observation."""
        self._expect(len(self._answers) == len(self._observations) - 1, "start() or add_observation()")
        ids = (*self._stream.ids, *self._pending.ids)
        images = (*self._stream.images, *self._pending.images)
        return Prompt(
            ids=ids,
            images=images,
            context_ids=self._pending.ids,
            context_images=self._pending.images,
            starts_segment=self._starts_segment,
            num_tokens=self._renderer.num_prompt_tokens(ids, images),
        )

    def add_response(self, response_ids: Sequence[int]) -> None:
        """The answer to prompt(), as sampled, end of turn included if it was sampled."""
        self._expect(len(self._answers) == len(self._observations) - 1, "start() or add_observation()")
        self._stream.append(self._pending)
        self._stream.append(Piece(tuple(response_ids)))
        self._pending = Piece(())
        self._answers.append(tuple(response_ids))

    def add_observation(
        self,
        observation: Observation | ImageRef,
        after: StepType | None = None,
        is_success: bool | None = None,
    ) -> None:
        """What came of the answer: a screenshot, a tool's text, or both.

        `after` and `is_success` are for context policies: the kind of action, and what a tool said of itself.
        """
        self._expect(0 < len(self._answers) == len(self._observations), "add_response()")
        newest = len(self._observations)
        shown = _observation(observation)
        self._observations.append(shown)
        self._seen.append(Seen(image_sha256=_hash(shown), after=after, is_success=is_success))
        view = next_view(self._policy, self._seen, self._in_view)
        self._in_view = view.in_view
        keeps = self._renderer.keeps_answers and not self._renderer.holds_placeholder(self._answers[-1])
        self._starts_segment = view.kind == "rewrite" or not keeps
        if self._starts_segment:
            self._rewrite()
        else:
            self._pending = self._renderer.observation(
                self._answers[-1], shown, is_shown=newest in view.in_view
            )

    def add_error(self, text: str) -> None:
        """What the policy is told of an answer that held no valid action."""
        self.add_observation(Observation(text=text), after="format_error")

    def _rewrite(self) -> None:
        """Write the whole history anew, each answer by its own ids."""
        shown, last = set(self._in_view), len(self._observations) - 1
        whole = _Stream()
        first = self._observations[0]
        whole.append(self._renderer.start(self._instruction, first, is_shown=0 in shown, is_last=last == 0))
        for position, answer in enumerate(self._answers, start=1):
            ids = self._renderer.history_ids(answer)
            whole.append(Piece(ids))
            whole.append(
                self._renderer.observation(
                    ids, self._observations[position], position in shown, is_last=position == last
                )
            )
        self._stream = _Stream()
        self._pending = Piece(tuple(whole.ids), tuple(whole.images))

    @staticmethod
    def _expect(is_right: bool, missing: str) -> None:
        if not is_right:
            raise RuntimeError(f"the episode's stream waits for {missing}")


def replay(turns: Sequence[Turn]) -> list[tuple[tuple[int, ...], tuple[ImageRef, ...]]]:
    """The prompt (ids, images) of each turn, rebuilt from the turns alone; equal id for id to what the engine was sent."""
    prompts = []
    ids: tuple[int, ...] = ()
    images: tuple[ImageRef, ...] = ()
    for turn in turns:
        if turn.starts_segment:
            ids, images = (), ()
        ids, images = (*ids, *turn.context_ids), (*images, *turn.context_images)
        prompts.append((ids, images))
        ids = (*ids, *turn.response_ids)
    return prompts


def _observation(given: Observation | ImageRef) -> Observation:
    return Observation(image=given) if isinstance(given, ImageRef) else given


def _hash(observation: Observation) -> str | None:
    return observation.image.sha256 if observation.image is not None else None
