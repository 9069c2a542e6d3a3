"""The nouns of the project: Task, Observation, Turn, Episode, EpisodeGroup, Segment.

All are frozen pydantic models: they cross process borders as JSON and are kept on disk as JSON lines. Images are never
inside: an ImageRef names the content, an image store has the bytes.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slime_cua.core.actions import Action
from slime_cua.core.routing import RoutedExperts

StopReason = Literal[
    "terminated", "max_turns", "max_tokens", "format_errors", "deadline", "invalid", "cancelled"
]
StepType = Literal["gui", "code", "mcp", "skill", "terminate", "format_error"]
NOT_SAMPLED = -1
"""In `versions` and `step_of_token`: this token was not sampled by the policy."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ImageRef(_Frozen):
    """A screenshot by content: the SHA-256 of its PNG bytes and its size in pixels."""

    sha256: str
    width_px: int
    height_px: int


class Task(_Frozen):
    """One task: OSWorld's JSON keys, plus OS-Helix' fields. Loaded by sandbox_cluster.tasks.

    Example: {"id": "starter/press-0007", "instruction": "Press the blue button.", "config": [{"type": "launch", ...}],
              "evaluator": {"func": "...", ...} or {"judges": [{"result_getter": ..., "expected_getter": ..., "code": ...}]}}
    """

    id: str
    instruction: str
    config: tuple[dict[str, Any], ...] = ()
    """OSWorld set-up steps: {"type": ..., "parameters": {...}}."""
    evaluator: dict[str, Any] = Field(default_factory=dict)
    family: str = ""
    """Task family or related app; results are averaged by it."""
    split: Literal["train", "demonstrations", "heldout", ""] = ""
    is_infeasible: bool = False
    related_apps: tuple[str, ...] = ()
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Never shown to the policy. A scripted teacher may read it."""


class Observation(_Frozen):
    """What the desktop or a tool gave back: a screenshot, a text, or both."""

    image: ImageRef | None = None
    text: str | None = None
    time_s: float = 0.0
    """Unix time of the capture."""


class Turn(_Frozen):
    """One request to the policy and what came of it.

    The prompt of turn n is: nothing kept (`starts_segment`) or prompt and response of turn n-1, then `context_ids`.
    So turns of a segment concatenate to one append-only stream, and what the engine saw is rebuilt id for id.

    Example: turn 0: starts_segment=True, context_ids = system + task + screenshot s1; response_ids = "<tool_call>..."
             turn 1: starts_segment=False, context_ids = end of turn 0's message + tool response with s2 + opening.
    """

    index: int
    starts_segment: bool
    context_ids: tuple[int, ...]
    """Rollout ids appended before this response: one placeholder id an image."""
    context_images: tuple[ImageRef, ...] = ()
    """Images of the placeholders in `context_ids`, in order."""
    response_ids: tuple[int, ...]
    response_logp: tuple[float, ...]
    """Engine log-probs of response_ids under the sampling distribution (temperature applied)."""
    response_versions: tuple[int, ...]
    """policy_version that sampled each id."""
    response_text: str = ""
    finish_reason: str = ""
    action: Action | None = None
    format_error: str | None = None
    """Code of the ActionParseError, if the response held no valid action."""
    observation: Observation | None = None
    """What the action gave back; the next turn's context shows it."""
    routed_experts: RoutedExperts | None = None
    """Of positions of the segment's stream (images expanded) that no earlier turn of the segment has recorded: from the last
    token of the turn before to the token before this response's last."""
    timings_s: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _lengths(self) -> Turn:
        n = len(self.response_ids)
        if len(self.response_logp) != n or len(self.response_versions) != n:
            raise ValueError(
                f"turn {self.index}: {n} ids, {len(self.response_logp)} log-probs, {len(self.response_versions)} versions"
            )
        return self

    @property
    def step_type(self) -> StepType:
        return "format_error" if self.action is None else self.action.type


class Episode(_Frozen):
    """One attempt at a task."""

    episode_id: str
    group_id: str
    task_id: str
    turns: tuple[Turn, ...]
    reward: float | None = None
    """The judge's score in [0, 1]; None when the judge did not run to its end (I8)."""
    stop_reason: StopReason
    error: str | None = None
    """Classified infrastructure failure, e.g. "SandboxError: the desktop's host is gone"."""
    started_s: float = 0.0
    ended_s: float = 0.0
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_valid(self) -> bool:
        """Counts for baselines, loss and sampler (I4)."""
        return (
            self.reward is not None
            and math.isfinite(self.reward)
            and self.error is None
            and self.stop_reason not in ("invalid", "cancelled")
        )


class EpisodeGroup(_Frozen):
    """G attempts at one task; the baseline is over its valid episodes."""

    group_id: str
    task_id: str
    episodes: tuple[Episode, ...]
    admitted_version: int


class Segment(_Frozen):
    """An append-only token stream of one episode: one training sample.

    Example (ids abbreviated): token_ids = [ctx, ctx, <image>, ctx, a, a, ctx, <image>, b]
                               is_trained = [0, 0, 0, 0, 1, 1, 0, 0, 1];  step_of_token = [-1,-1,-1,-1, 0, 0,-1,-1, 1]
    """

    segment_id: str
    episode_id: str
    group_id: str
    task_id: str
    token_ids: tuple[int, ...]
    is_trained: tuple[bool, ...]
    logp: tuple[float, ...]
    """Engine log-probs where trained, 0 elsewhere."""
    versions: tuple[int, ...]
    step_of_token: tuple[int, ...]
    """Index of the action step inside this segment for trained tokens, else NOT_SAMPLED."""
    step_types: tuple[StepType, ...]
    images: tuple[ImageRef, ...] = ()
    routed_experts: RoutedExperts | None = None
    """From the stream's first position (images expanded) on; None when the engine recorded none."""
    is_format_error: bool = False
    """A single response that held no valid action: its reward is 0 whatever its episode got (I2)."""

    @model_validator(mode="after")
    def _lengths(self) -> Segment:
        lengths = {
            len(self.token_ids),
            len(self.is_trained),
            len(self.logp),
            len(self.versions),
            len(self.step_of_token),
        }
        if len(lengths) != 1:
            raise ValueError(f"segment {self.segment_id}: streams of different lengths {sorted(lengths)}")
        return self


class TrainSample(_Frozen):
    """A segment with what the loss needs to know about it."""

    segment: Segment
    advantage: float = 0.0
    sample_weight: float = 1.0
    reward: float | None = None
