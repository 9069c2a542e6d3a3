"""The replay's trace on the live stack, on a real clock: does the replay tell the truth?

Real: gateway and host processes, leases and calls over sockets, the sandbox client, player, episode runner, renderer and
parser, the rollout worker and its scheduler, stores on disk. Doubles at the borders: fake desktops, whose actions take the
trace's time; a policy that answers after the time that the replay's engines need; a trainer that sleeps for the step.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollout.actions import ActionSpace, format_action
from rollout.context import context_policy
from rollout.episode import EpisodeRunner
from rollout.player import Player
from rollout.ports import Sampled
from rollout.renderer import Renderer
from rollout.replay.generate import GeneratedTrace
from rollout.replay.machines import Engine
from rollout.replay.policies import Policy
from rollout.replay.scenario import ScenarioConfig, SiteConfig, TasksConfig
from rollout.replay.simulate import EpisodeResult, Replay, Run
from rollout.replay.trace import EpisodeTrace, GroupTrace, Trace, TurnTrace
from sandbox_cluster.cluster import LocalCluster
from slime_cua.config.rollout import RendererConfig, RolloutConfig
from slime_cua.config.sandbox import SandboxConfig
from slime_cua.core.actions import Action, GuiAction, TerminateAction
from slime_cua.core.types import Episode, ImageRef, Task
from slime_cua.data.episodes import EpisodeStore
from slime_cua.data.images import ImageStore
from slime_cua.launch.desktops import GatewayDesktops

MAX_ACT_S = 25.0
"""Below the client's deadline of a step."""
SHORT = ScenarioConfig(
    name="short live trace",
    num_steps=6,
    groups_per_step=2,
    episodes_per_group=2,
    site=SiteConfig(
        num_desktops=8, num_engines=1, decode_s=0.01, decode_s_per_request=0.0005, publish_s=0.3, step_s=3.0
    ),
    tasks=TasksConfig(
        num_tasks=16,
        median_s=5.0,
        task_sigma=0.5,
        episode_sigma=0.3,
        min_s=2.0,
        max_s=12.0,
        turn_s=1.2,
        response_tokens=40.0,
        boot_s=0.0,
        setup_s=0.3,
        failure_rate=0.0,
    ),
)
"""Under a minute of wall time."""


@dataclass
class EndingTrace:
    """Episodes end by a terminate call, as live ones do: one more short request, no time for a judge."""

    inner: Trace
    _groups: dict[tuple[str, int], GroupTrace] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def task_ids(self) -> Sequence[str]:
        return self.inner.task_ids

    def draw(self, index: int) -> str:
        return self.inner.draw(index)

    def group(self, task_id: str, occurrence: int) -> GroupTrace:
        key = (task_id, occurrence)
        if key not in self._groups:
            group = self.inner.group(task_id, occurrence)
            self._groups[key] = GroupTrace(task_id, tuple(map(_ending, group.episodes)))
        return self._groups[key]


def _ending(episode: EpisodeTrace) -> EpisodeTrace:
    last = episode.turns[-1]
    seen = last.prompt_tokens + last.response_tokens
    end = TurnTrace(new_tokens=20, prompt_tokens=seen + 20, response_tokens=20, act_s=0.0)
    turns = tuple(replace(turn, act_s=min(MAX_ACT_S, turn.act_s)) for turn in episode.turns)
    return replace(episode, turns=(*turns, end), judge_s=0.0)


@dataclass
class TracePolicy:
    """`rollout.ports.PolicyPort` of one episode: waits as long as the trace's desktop acts, after the engine's time."""

    run: LiveRun
    engine: Engine
    result: EpisodeResult
    encode: Callable[[Action], tuple[int, ...]]
    _turn: int = 0

    async def generate(
        self, prompt_ids: Sequence[int], images: Sequence[tuple[ImageRef, bytes]], *, session: str
    ) -> Sampled:
        """The next wait action, or the end; log-probs are 0: nobody sampled it."""
        turns = self.result.trace.turns
        turn, is_last = turns[self._turn], self._turn == len(turns) - 1
        self._turn += 1
        pieces = await self.run.site.sample(session, self.engine, turn)
        self.result.tokens.update(pieces)
        status = "failure" if self.result.trace.reward else "success"
        action: Action = (
            TerminateAction(status=status) if is_last else GuiAction(kind="wait", time_s=round(turn.act_s, 3))
        )
        ids = self.encode(action)
        version = min(pieces, default=self.engine.version)
        return Sampled(ids, (0.0,) * len(ids), (version,) * len(ids), "stop")


class LiveRun(Run):
    """A Run whose episodes are played by the live stack."""

    def __init__(
        self,
        trace: Trace,
        scenario: ScenarioConfig,
        policy: Policy,
        player: Player,
        renderer: Renderer,
        store: Path,
    ) -> None:
        self._player, self._renderer, self._store_path = player, renderer, store
        super().__init__(trace, scenario, policy)

    def store(self) -> EpisodeStore:
        return EpisodeStore(self._store_path)

    async def play(self, task: Task, group_id: str, episode_id: str, on_request: Any) -> Episode:
        """A real episode of the attempt. Judged by the last action alone: a task that cannot be done wants FAIL."""
        result = self.attempt(task.id, group_id, episode_id)
        sleep = {"type": "sleep", "parameters": {"seconds": result.trace.setup_s}}
        live = Task(id=task.id, instruction="Wait.", config=(sleep,), evaluator={"func": "infeasible"})
        async with self.site.session(episode_id) as engine:
            policy = TracePolicy(self, engine, result, self._encode)
            return await self._player.play(
                live, policy, group_id=group_id, episode_id=episode_id, on_request=on_request
            )

    def _encode(self, action: Action) -> tuple[int, ...]:
        return self._renderer.answer_ids(format_action(action))


def run_live(scenario: ScenarioConfig, trace: Trace, policy: Policy, model: Path, folder: Path) -> Replay:
    """Play the trace on the live stack under `folder`; tokenizer and template come from the checkpoint `model`."""
    site = scenario.site
    sandbox = SandboxConfig(
        provider="fake",
        num_desktops=site.num_desktops,
        num_spares=2,
        screen_wh_px=(320, 200),
        settle_quiet_ms=0,
        settle_max_ms=0,
    )
    rollout = RolloutConfig(renderer=RendererConfig(prompt="short"))
    space = ActionSpace.from_config(rollout.action_space)
    renderer = Renderer.from_config(model, rollout.renderer, space)
    runner = EpisodeRunner(rollout, renderer, context_policy(rollout.context), ImageStore(folder / "images"))

    async def main(url: str, token: str) -> Replay:
        desktops = GatewayDesktops(url, token, sandbox)
        player = Player(runner, desktops, site.num_desktops)
        run = LiveRun(trace, scenario, policy, player, renderer, folder / "rl.jsonl")
        try:
            return await run.run()
        finally:
            await desktops.close()

    with LocalCluster(sandbox, folder / "sandbox") as cluster:
        return asyncio.run(main(cluster.url, cluster.token))


def live_and_replayed(policy: Policy, model: Path, scenario: ScenarioConfig = SHORT) -> tuple[Replay, Replay]:
    """The same trace on the live stack and in the replay."""
    from rollout.replay.simulate import simulate

    trace = EndingTrace(GeneratedTrace(scenario))
    with tempfile.TemporaryDirectory() as folder:
        live = run_live(scenario, trace, policy, model, Path(folder))
    return live, simulate(trace, scenario, policy)
