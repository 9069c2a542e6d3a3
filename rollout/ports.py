"""What an episode needs from the outside, as Protocols: a policy, a desktop, a renderer. The shipped implementations are
rollout.engines.EngineClient, sandbox_cluster.client and rollout.renderer; tests use shipped doubles of the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from slime_cua.core.actions import CodeAction, GuiAction
from slime_cua.core.routing import RoutedExperts
from slime_cua.core.types import ImageRef, Task

if TYPE_CHECKING:  # the process that owns an engine has no use for an HTTP client of desktops
    from sandbox_cluster.api import EvaluateReply, ExecuteReply
    from sandbox_cluster.client import Shot


class DesktopPort(Protocol):
    """A leased desktop. Every method raises SandboxError (or its kin) on infrastructure failure."""

    async def setup(self, task: Task) -> object: ...
    async def screenshot(self) -> Shot: ...
    async def step(self, actions: Sequence[GuiAction], action_id: str) -> Shot: ...
    async def execute(self, action: CodeAction, action_id: str) -> ExecuteReply: ...
    async def evaluate(self, task: Task, last_action: str | None) -> EvaluateReply: ...


@dataclass(frozen=True)
class Sampled:
    """What the policy server gave back for one turn; pieces from before and after an update are concatenated."""

    ids: tuple[int, ...]
    logp: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    routed_experts: RoutedExperts | None = None
    """Of the whole stream but its last token."""


class PolicyPort(Protocol):
    """A policy server. Raises EngineError on infrastructure failure."""

    async def generate(
        self, prompt_ids: Sequence[int], images: Sequence[tuple[ImageRef, bytes]], *, session: str
    ) -> Sampled: ...
