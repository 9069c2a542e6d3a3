"""Which screenshots stay in view: the interface, and what a choice means for the running segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from slime_cua.core.types import StepType


@dataclass(frozen=True)
class Seen:
    """One observation of the history as a context policy sees it; the first one comes before any action."""

    image_sha256: str | None
    """None: the observation has no screenshot."""
    after: StepType | None = None
    """The kind of action that it followed."""
    is_success: bool | None = None
    """What a tool said of itself, where one was called."""


class ContextPolicy(Protocol):
    """Chooses among the screenshots that could be shown in the next prompt."""

    def choose(self, history: Sequence[Seen], candidates: tuple[int, ...]) -> tuple[int, ...]:
        """The positions in `history` whose screenshots are shown, a part of `candidates` in the same order.

        `candidates` are those that the last prompt showed, then the newest observation's (position len(history) - 1)
        if it has one. The answer may depend on nothing else, so that a history replays to the same views.
        """
        ...


@dataclass(frozen=True)
class View:
    """Example: s1..s10 were shown, s11 came: View("rewrite", (6, 7, 8, 9, 10))."""

    kind: Literal["extend", "rewrite"]
    in_view: tuple[int, ...]
    """Positions in the history, oldest first."""


def next_view(policy: ContextPolicy, history: Sequence[Seen], in_view: tuple[int, ...]) -> View:
    """What the next prompt shows, `history[-1]` being new: `extend` if all of `in_view` stay, else `rewrite`.

    Raises ValueError when the policy shows something that is no candidate.
    """
    newest = len(history) - 1
    candidates = (*in_view, newest) if history[newest].image_sha256 is not None else in_view
    chosen = tuple(policy.choose(history, candidates))
    if list(chosen) != [position for position in candidates if position in set(chosen)]:
        raise ValueError(f"{type(policy).__name__} chose {chosen}, which is no ordered part of {candidates}")
    return View("extend" if set(in_view) <= set(chosen) else "rewrite", chosen)
