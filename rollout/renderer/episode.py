"""The running token stream of one episode: what the policy is asked, and the context fields of each Turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.context import ContextPolicy, Seen, next_view
from rollout.renderer.renderer import Piece, Renderer
from slime_cua.core.types import ImageRef, Observation, StepType, Turn


@dataclass(frozen=True)
class Prompt:
    """One request: the whole stream, and the part of it that is new since the last answer."""

    token_ids: tuple[int, ...]
    """Rollout ids, one placeholder an image, from the start of the segment."""
    images: tuple[ImageRef, ...]
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
    """prompt() -> engine -> add_response(ids) -> add_observation(...) -> prompt() -> ...

    Answers enter the stream as the ids that were sampled. When the context policy takes a screenshot away, or the template
    changes earlier answers, the stream is written anew: `starts_segment` is then true and the whole prompt is context.
    """

    def __init__(
        self, renderer: Renderer, policy: ContextPolicy, instruction: str, observation: Observation
    ) -> None:
        self._renderer, self._policy, self._instruction = renderer, policy, instruction
        self._observations = [observation]
        self._answers: list[tuple[int, ...]] = []
        self._seen = [Seen(image_sha256=_hash(observation))]
        self._in_view = next_view(policy, self._seen, ()).in_view
        self._stream = _Stream()
        self._pending = renderer.start(instruction, observation, is_shown=0 in self._in_view)
        self._starts_segment = True

    @property
    def in_view(self) -> tuple[int, ...]:
        """Positions of the observations whose screenshots the next prompt shows."""
        return self._in_view

    def prompt(self) -> Prompt:
        """The next request. Raises RuntimeError while the last answer waits for its observation."""
        self._expect(len(self._answers) == len(self._observations) - 1, "add_observation")
        ids = (*self._stream.ids, *self._pending.ids)
        images = (*self._stream.images, *self._pending.images)
        return Prompt(
            token_ids=ids,
            images=images,
            context_ids=self._pending.ids,
            context_images=self._pending.images,
            starts_segment=self._starts_segment,
            num_tokens=self._renderer.num_prompt_tokens(ids, images),
        )

    def add_response(self, response_ids: Sequence[int]) -> None:
        """The answer to prompt(), as sampled, end of turn included if it was sampled."""
        self._expect(len(self._answers) == len(self._observations) - 1, "add_observation")
        self._stream.append(self._pending)
        self._stream.append(Piece(tuple(response_ids)))
        self._answers.append(tuple(response_ids))

    def add_observation(
        self, observation: Observation, after: StepType | None = None, is_success: bool | None = None
    ) -> None:
        """What came of the answer: a screenshot, a tool's text, or the text of a format error.

        `after` and `is_success` are for context policies: the kind of action, and what a tool said of itself.
        """
        self._expect(len(self._answers) == len(self._observations), "add_response")
        self._observations.append(observation)
        self._seen.append(Seen(image_sha256=_hash(observation), after=after, is_success=is_success))
        view = next_view(self._policy, self._seen, self._in_view)
        self._in_view = view.in_view
        self._starts_segment = view.kind == "rewrite" or not self._renderer.keeps_answers
        if self._starts_segment:
            self._rewrite()
        else:
            newest = len(self._observations) - 1
            self._pending = self._renderer.observation(
                self._answers[-1], observation, is_shown=newest in view.in_view
            )

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
            raise RuntimeError(f"the episode's stream waits for {missing}()")


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


def _hash(observation: Observation) -> str | None:
    return observation.image.sha256 if observation.image is not None else None
