"""From an episode's turns to segments: append-only token streams in which every valid response is trained once (I2).

    turns      [c0 r0] [c1 r1] | [c2 r2]          | = the context policy rewrote history
    segments   c0 R0 c1 R1       c2 R2            capital: trained

A response without a valid action is never trained where others build on it. It becomes its own segment, with the
running stream as context, so that its reward of 0 falls on it alone:

    turns      [c0 r0] [c1 x1] [c2 r2]
    segments   c0 R0 c1 x1 c2 R2      and      c0 r0 c1 X1
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slime_cua.core.errors import DataError
from slime_cua.core.routing import RoutedExperts, join
from slime_cua.core.types import NOT_SAMPLED, Episode, ImageRef, Segment, StepType, Turn


def build_segments(episode: Episode, oldest_version: int = 0) -> list[Segment]:
    """Segments of `episode`, in the order of their first trained token's turn; streams without trained tokens are left out.

    A turn with neither action nor format error (cut off by a deadline) stays as untrained context, and so does one with a
    token of a version below `oldest_version`.
    Raises DataError if the first turn does not start a segment, or a turn with an action has no tokens.
    """
    segments: list[Segment] = []
    running: _Stream | None = None
    for turn in episode.turns:
        if turn.starts_segment:
            if running is not None:
                segments += running.close()
            running = _Stream(episode, name=f"{episode.episode_id}/{turn.index}")
        if running is None:
            raise DataError(
                f"episode {episode.episode_id}: turn {turn.index} continues a segment that never began"
            )
        running.add_context(turn)
        if min(turn.response_versions, default=oldest_version) < oldest_version:
            running.add_response(turn, is_trained=False)
            continue
        if turn.action is not None:
            running.add_response(turn, is_trained=True)
            continue
        if turn.format_error is not None and turn.response_ids:
            segments.append(running.with_format_error(turn))
        running.add_response(turn, is_trained=False)
    if running is not None:
        segments += running.close()
    return segments


@dataclass
class _Stream:
    """The running segment."""

    episode: Episode
    name: str
    token_ids: list[int] = field(default_factory=list)
    is_trained: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    step_of_token: list[int] = field(default_factory=list)
    step_types: list[StepType] = field(default_factory=list)
    images: list[ImageRef] = field(default_factory=list)
    routed: list[RoutedExperts | None] = field(default_factory=list)

    def add_context(self, turn: Turn) -> None:
        self._extend(turn.context_ids)
        self.images += turn.context_images

    def add_response(self, turn: Turn, is_trained: bool) -> None:
        self.routed.append(turn.routed_experts)
        if not is_trained:
            self._extend(turn.response_ids)
            return
        if not turn.response_ids:
            raise DataError(
                f"episode {self.episode.episode_id}: turn {turn.index} has an action but no tokens"
            )
        self.token_ids += turn.response_ids
        self.is_trained += [True] * len(turn.response_ids)
        self.logp += turn.response_logp
        self.versions += turn.response_versions
        self.step_of_token += [len(self.step_types)] * len(turn.response_ids)
        self.step_types.append(turn.step_type)

    def with_format_error(self, turn: Turn) -> Segment:
        """The stream so far, untrained, then the response that held no valid action."""
        own = _Stream(self.episode, f"{self.name}/format-{turn.index}", images=list(self.images))
        own.routed = list(self.routed)
        own._extend(tuple(self.token_ids))
        own.add_response(turn, is_trained=True)
        return own._segment(is_format_error=True)

    def close(self) -> list[Segment]:
        return [self._segment(is_format_error=False)] if self.step_types else []

    def _extend(self, token_ids: tuple[int, ...]) -> None:
        self.token_ids += token_ids
        self.is_trained += [False] * len(token_ids)
        self.logp += [0.0] * len(token_ids)
        self.versions += [NOT_SAMPLED] * len(token_ids)
        self.step_of_token += [NOT_SAMPLED] * len(token_ids)

    def _segment(self, is_format_error: bool) -> Segment:
        return Segment(
            segment_id=self.name,
            episode_id=self.episode.episode_id,
            group_id=self.episode.group_id,
            task_id=self.episode.task_id,
            token_ids=tuple(self.token_ids),
            is_trained=tuple(self.is_trained),
            logp=tuple(self.logp),
            versions=tuple(self.versions),
            step_of_token=tuple(self.step_of_token),
            step_types=tuple(self.step_types),
            images=tuple(self.images),
            routed_experts=join(self.routed),
            is_format_error=is_format_error,
        )
