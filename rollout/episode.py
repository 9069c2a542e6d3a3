"""One attempt at a task: prompt, sample, parse, act, look; then the judge.

    desktop.setup -> screenshot -> [ prompt -> policy -> parse -> act -> observation ] * -> judge -> Episode

Every failure ends here, classified once: the policy's own mistakes stay in the episode, infrastructure failures make it
invalid (I4). Deadlines: turn < episode; the caller gives a desktop that has its own inside them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rollout.acting import Hands, Outcome, hands_of
from rollout.actions import error_text, parse
from rollout.context import ContextPolicy
from rollout.ports import DesktopPort, PolicyPort, Sampled
from rollout.renderer import EpisodeRenderer, Renderer
from rollout.renderer.episode import Prompt
from rollout.tools import SkillLibrary, ToolSource
from slime_cua.config.rollout import RolloutConfig
from slime_cua.core.actions import TerminateAction
from slime_cua.core.errors import ActionParseError, InfrastructureError
from slime_cua.core.routing import RoutedExperts
from slime_cua.core.types import Episode, ImageRef, Observation, StopReason, Task, Turn
from slime_cua.data.images import ImageStore

OnRequest = Callable[[], None]


@dataclass
class EpisodeRunner:
    """Runs episodes of one config. `images` keeps the screenshots; `tools` and `skills` are what its action space offers."""

    config: RolloutConfig
    renderer: Renderer
    context: ContextPolicy
    images: ImageStore
    tools: ToolSource | None = None
    skills: SkillLibrary | None = None

    async def run(
        self,
        task: Task,
        desktop: DesktopPort,
        policy: PolicyPort,
        *,
        episode_id: str,
        group_id: str,
        on_request: OnRequest = lambda: None,
    ) -> Episode:
        """The finished episode; never raises but for cancellation and our own bugs. `on_request` is called before each request:
        from then on the episode may hold tokens of the current weights."""
        trace = _Trace(episode_id, group_id, task.id)
        try:
            async with asyncio.timeout(self.config.episode_timeout_s):
                await self._play(task, desktop, policy, trace, on_request)
                with trace.phase("judge"):
                    reply = await desktop.evaluate(task, trace.last_action())
                trace.reward = reply.score
                if reply.score is None:
                    trace.fail(f"JudgeError: {reply.invalid_reason}")
        except InfrastructureError as error:
            trace.fail(f"{type(error).__name__}: {error}")
        except TimeoutError:
            trace.fail(
                f"InfrastructureError: no end within episode_timeout_s = {self.config.episode_timeout_s}"
            )
        return trace.finish()

    async def _play(
        self, task: Task, desktop: DesktopPort, policy: PolicyPort, trace: _Trace, on_request: OnRequest
    ) -> None:
        with trace.phase("setup"):
            await desktop.setup(task)
        space = self.config.action_space
        async with hands_of(
            desktop,
            self.images,
            episode_id=trace.episode_id,
            tools=self.tools,
            skills=self.skills,
            tool_timeout_s=space.tool_timeout_s,
        ) as hands:
            with trace.phase("setup"):
                offered = await hands.tools(task.instruction, space.max_mcp_tools)
                first = await hands.look()
            stream = EpisodeRenderer(self.renderer.offering(offered), self.context)
            stream.start(task.instruction, first)
            await self._turns(hands, policy, stream, trace, on_request)

    async def _turns(
        self,
        hands: Hands,
        policy: PolicyPort,
        stream: EpisodeRenderer,
        trace: _Trace,
        on_request: OnRequest,
    ) -> None:
        room = self.config.engine.max_context_tokens - self.config.sampling.max_response_tokens
        for index in range(self.config.max_turns):
            if stream.num_tokens > room:
                trace.stop_reason = "max_tokens"
                return
            turn = await self._turn(index, hands, policy, stream, trace, on_request)
            trace.turns.append(turn)
            if isinstance(turn.action, TerminateAction):
                trace.stop_reason = "terminated"
                return
            if trace.trailing_format_errors() >= self.config.max_format_errors:
                trace.stop_reason = "format_errors"
                return
        trace.stop_reason = "max_turns"

    async def _turn(
        self,
        index: int,
        hands: Hands,
        policy: PolicyPort,
        stream: EpisodeRenderer,
        trace: _Trace,
        on_request: OnRequest,
    ) -> Turn:
        prompt = stream.prompt()
        on_request()
        with trace.phase("generate"):
            answer = await self._sample(policy, prompt.ids, prompt.images, trace.episode_id)
        sampled = self._without_placeholder(answer)
        stream.add_response(sampled.ids)
        text = self._text(sampled.ids)
        action, format_error, outcome = None, None, None
        try:
            if sampled is not answer:
                raise ActionParseError("image_token", "a response cannot hold an image")
            action = parse(text, space=stream.space)
        except ActionParseError as error:
            format_error = error.code
            outcome = Outcome(Observation(text=error_text(error), time_s=time.time()))
        if action is not None and not isinstance(action, TerminateAction):
            with trace.phase("act"):
                outcome = await hands.act(action, f"{trace.episode_id}-t{index}")
        if outcome is not None:
            kind = "format_error" if action is None else action.type
            stream.add_observation(outcome.observation, kind, outcome.is_success)
        return Turn(
            index=index,
            starts_segment=prompt.starts_segment,
            context_ids=prompt.context_ids,
            context_images=prompt.context_images,
            response_ids=sampled.ids,
            response_logp=sampled.logp,
            response_versions=sampled.versions,
            response_text=text,
            finish_reason=sampled.finish_reason,
            action=action,
            format_error=format_error,
            observation=outcome.observation if outcome is not None else None,
            routed_experts=self._new_routing(prompt, sampled),
            timings_s=trace.take_timings(),
        )

    def _new_routing(self, prompt: Prompt, sampled: Sampled) -> RoutedExperts | None:
        """What this turn adds to the segment's record: from the last token of the turn before, which that turn had not run."""
        if sampled.routed_experts is None:
            return None
        added = self.renderer.num_prompt_tokens(prompt.context_ids, prompt.context_images)
        start = 0 if prompt.starts_segment else prompt.num_tokens - added - 1
        return sampled.routed_experts.cut(start, prompt.num_tokens + len(sampled.ids) - 1)

    def _without_placeholder(self, sampled: Sampled) -> Sampled:
        """The tokens before a sampled image placeholder: with it, the response could not be a prompt again (I1)."""
        marks = [
            position for position, token in enumerate(sampled.ids) if token in self.renderer.placeholder_ids
        ]
        if not marks:
            return sampled
        end = marks[0]
        return replace(
            sampled, ids=sampled.ids[:end], logp=sampled.logp[:end], versions=sampled.versions[:end]
        )

    def _text(self, ids: Sequence[int]) -> str:
        """What the parser reads: the response without its end of turn."""
        is_ended = bool(ids) and ids[-1] in self.renderer.stop_ids
        return self.renderer.text_of_ids(ids[:-1] if is_ended else ids)

    async def _sample(
        self, policy: PolicyPort, ids: Sequence[int], refs: Sequence[ImageRef], session: str
    ) -> Sampled:
        pairs = [(ref, self.images.get(ref)) for ref in refs]
        try:
            async with asyncio.timeout(self.config.turn_timeout_s):
                return await policy.generate(ids, pairs, session=session)
        except TimeoutError as error:
            raise InfrastructureError(
                f"no response within turn_timeout_s = {self.config.turn_timeout_s}"
            ) from error


@dataclass
class _Trace:
    """An episode in the making."""

    episode_id: str
    group_id: str
    task_id: str
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    stop_reason: StopReason = "invalid"
    error: str | None = None
    started_s: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    """The same moment on a clock that is never set."""
    timings_s: dict[str, float] = field(default_factory=dict)

    def phase(self, name: str) -> _Phase:
        return _Phase(self, name)

    def take_timings(self) -> dict[str, float]:
        taken, self.timings_s = self.timings_s, {}
        return taken

    def fail(self, error: str) -> None:
        self.error, self.stop_reason, self.reward = error, "invalid", None

    def last_action(self) -> str | None:
        """OSWorld's word for how the policy ended: DONE, FAIL, or None when it never said."""
        action = self.turns[-1].action if self.turns else None
        if not isinstance(action, TerminateAction):
            return None
        return "DONE" if action.status == "success" else "FAIL"

    def trailing_format_errors(self) -> int:
        count = 0
        for turn in reversed(self.turns):
            if turn.format_error is None:
                break
            count += 1
        return count

    def finish(self) -> Episode:
        return Episode(
            episode_id=self.episode_id,
            group_id=self.group_id,
            task_id=self.task_id,
            turns=tuple(self.turns),
            reward=self.reward,
            stop_reason=self.stop_reason,
            error=self.error,
            started_s=self.started_s,
            ended_s=self.started_s + time.monotonic() - self.began,
        )


@dataclass
class _Phase:
    trace: _Trace
    name: str
    start_s: float = 0.0

    def __enter__(self) -> None:
        self.start_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        spent = time.monotonic() - self.start_s
        self.trace.timings_s[self.name] = self.trace.timings_s.get(self.name, 0.0) + spent
