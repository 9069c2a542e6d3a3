"""The context policies, and the one place that knows them by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from rollout.context.base import ContextPolicy, Seen
from slime_cua.config.rollout import ContextConfig
from slime_cua.core.errors import ConfigError


@dataclass(frozen=True)
class SlidingWindow:
    """Grow to `max_images`; when one more comes, keep the `retain` newest, so that most turns only extend.

    Source: OS-Helix, training window: s1..s10 in view, s11 arrives, s7..s11 stay (max_images 10, retain 5).
    """

    max_images: int = 10
    retain: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.retain <= self.max_images:
            raise ConfigError(
                f"context.retain = {self.retain} must be at least 1 and at most max_images = {self.max_images}"
            )

    def choose(self, history: Sequence[Seen], candidates: tuple[int, ...]) -> tuple[int, ...]:
        return candidates if len(candidates) <= self.max_images else candidates[-self.retain :]


@dataclass(frozen=True)
class LastImages:
    """Always the `num_images` newest: every turn past that rewrites. Source: hybrid-routing-agent's img4 and img2."""

    num_images: int

    def __post_init__(self) -> None:
        if self.num_images < 1:
            raise ConfigError(f"context.max_images = {self.num_images} must be at least 1")

    def choose(self, history: Sequence[Seen], candidates: tuple[int, ...]) -> tuple[int, ...]:
        return candidates[-self.num_images :]


@dataclass(frozen=True)
class SkipOnMcpSuccess:
    """The screenshot after an MCP call that succeeded is not shown: the result is there as text.

    Source: hybrid-routing-agent, skip_on_mcp_success.
    """

    def choose(self, history: Sequence[Seen], candidates: tuple[int, ...]) -> tuple[int, ...]:
        newest = history[-1]
        skips = newest.after == "mcp" and newest.is_success is True
        return _without_newest(history, candidates) if skips else candidates


@dataclass(frozen=True)
class SkipOnNoChange:
    """A screenshot equal to the last one shown is not shown again, at most `max_in_a_row` times.

    Source: hybrid-routing-agent, skip_on_no_change.
    """

    max_in_a_row: int = 2

    def choose(self, history: Sequence[Seen], candidates: tuple[int, ...]) -> tuple[int, ...]:
        newest = len(history) - 1
        if candidates[-1:] != (newest,) or len(candidates) < 2:
            return candidates
        last_shown = candidates[-2]
        if history[last_shown].image_sha256 != history[newest].image_sha256:
            return candidates
        skipped = sum(seen.image_sha256 is not None for seen in history[last_shown + 1 : newest])
        return candidates if skipped >= self.max_in_a_row else _without_newest(history, candidates)


@dataclass(frozen=True)
class Composed:
    """Policies one after the other, each choosing among what the one before left."""

    policies: tuple[ContextPolicy, ...]

    def choose(self, history: Sequence[Seen], candidates: tuple[int, ...]) -> tuple[int, ...]:
        for policy in self.policies:
            candidates = policy.choose(history, candidates)
        return candidates


def _without_newest(history: Sequence[Seen], candidates: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(position for position in candidates if position != len(history) - 1)


SKIPS: dict[str, Callable[[ContextConfig], ContextPolicy]] = {
    "skip_on_mcp_success": lambda config: SkipOnMcpSuccess(),
    "skip_on_no_change": lambda config: SkipOnNoChange(),
}
WINDOWS: dict[str, Callable[[ContextConfig], ContextPolicy]] = {
    "sliding_window": lambda config: SlidingWindow(config.max_images, config.retain),
    "last_images": lambda config: LastImages(config.max_images),
}


def context_policy(config: ContextConfig) -> ContextPolicy:
    """The policy that `config.name` means: names joined by "+", e.g. "sliding_window+skip_on_no_change".

    Skips choose before windows, whatever the order of the names, so that a screenshot which is not shown costs no room.
    `module:Name` is called with the config. Raises ConfigError naming what is known.
    """
    names = [name.strip() for name in config.name.split("+")]
    ordered = [name for name in names if name in SKIPS] + [name for name in names if name not in SKIPS]
    policies = tuple(_one(name, config) for name in ordered)
    return policies[0] if len(policies) == 1 else Composed(policies)


def _one(name: str, config: ContextConfig) -> ContextPolicy:
    factory = SKIPS.get(name) or WINDOWS.get(name)
    if factory is not None:
        return factory(config)
    module_name, _, attribute = name.partition(":")
    if not attribute:
        known = ", ".join([*WINDOWS, *SKIPS])
        raise ConfigError(f"context.name = {name!r}: known are {known}, or module:Name of your own")
    try:
        own = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"context.name = {name!r}: {error}") from error
    return cast(ContextPolicy, own(config))
