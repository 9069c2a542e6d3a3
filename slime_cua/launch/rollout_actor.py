"""The rollout side as one asyncio Ray actor: desktops, policy, renderer, worker. The driver calls it by phase."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollout.actions import ActionSpace, format_action
from rollout.context import context_policy
from rollout.engines.client import EngineClient
from rollout.engines.policy import EnginePolicy
from rollout.episode import EpisodeRunner
from rollout.metrics import batch_metrics
from rollout.player import Busy, Player, WatchedPolicy
from rollout.ports import PolicyPort
from rollout.renderer import Renderer
from rollout.renderer.without_torch import runs_own_code, transformers_without_torch
from rollout.scheduler import Scheduler
from rollout.sweep import Item, sweep
from rollout.tools import skill_library, tool_source
from rollout.worker import RolloutWorker
from slime_cua.algo.frontier import make_sampler
from slime_cua.config.run import RunConfig
from slime_cua.convert import read_config, routing_shape
from slime_cua.core.actions import Action
from slime_cua.core.errors import ConfigError
from slime_cua.core.startup import heavy_imports
from slime_cua.core.types import Episode, EpisodeGroup, Task
from slime_cua.data.episodes import EpisodeStore, OpenGroups
from slime_cua.data.images import ImageStore, Needs
from slime_cua.launch.desktops import GatewayDesktops
from slime_cua.launch.image_needs import needed_images
from slime_cua.sft.demonstrations import TeacherPolicy
from slime_cua.sft.teacher import ScriptedTeacher

log = logging.getLogger(__name__)
JUST_ENDED_S = 10.0
"""An episode that ended is on record (episodes/) after that at the latest; file times are rough, too."""


class RolloutActor:
    """One instance a run. `hf_dir` gives tokenizer, template and processor; they do not change in a run."""

    def __init__(
        self, config: dict[str, Any], hf_dir: str, gateway_url: str, token: str, run_dir: str
    ) -> None:
        self.config = RunConfig.model_validate(config)
        self.run_dir = Path(run_dir)
        self._arguments = (hf_dir, gateway_url, token)
        output_to(self.run_dir / "logs" / "rollout.log")
        self.worker: RolloutWorker | None = None
        self._engine_busy = Busy(1)
        self._family_of: dict[str, str] = {}
        self._progress = (0, 0)
        self._num_ended = 0
        self._running_since: dict[str, tuple[float, float]] = {}
        """Wall clock and monotonic clock at the start of each running episode."""

    async def open(self) -> None:
        """Load what episodes need. Apart from the constructor, so that a failure comes back as itself."""
        hf_dir, gateway_url, token = self._arguments
        rollout = self.config.rollout
        self.images = ImageStore(self.run_dir / "images", rollout.max_image_bytes, self._needs)
        space = ActionSpace.from_config(rollout.action_space)
        with (
            heavy_imports(),
            contextlib.nullcontext() if runs_own_code(rollout) else transformers_without_torch(),
        ):
            self.renderer = Renderer.from_config(hf_dir, rollout.renderer, space)
        self.desktops = GatewayDesktops(
            gateway_url, token, self.config.sandbox, is_blind=self.config.evaluation.is_image_blank
        )
        self.engines = EngineClient(
            (),
            self.renderer.images,
            request_timeout_s=rollout.engine.request_timeout_s,
            routing_shape=routing_shape(read_config(hf_dir)) if rollout.engine.records_routing else None,
        )
        runner = EpisodeRunner(
            rollout,
            self.renderer,
            context_policy(rollout.context),
            self.images,
            tool_source(rollout.action_space),
            skill_library(rollout.action_space),
        )
        self.player = Player(runner, self.desktops, self.config.sandbox.num_desktops)

    async def set_engines(self, urls: Sequence[str], min_version: int) -> None:
        """Use these engines; answers from older weights are not taken."""
        self.engines.set_engines(urls, min_version)

    async def progress(self) -> tuple[int, int, int]:
        """(finished, of how many) of the sweep that runs; episodes that ended so far, in whatever way."""
        return (*self._progress, self._num_ended)

    async def demonstrate(self, name: str, tasks: list[Task], num_episodes: int) -> list[Episode]:
        """Scripted demonstrations, `num_episodes` of them over `tasks` in turn, kept in episodes/NAME.jsonl."""

        async def play(task: Task, group_id: str, episode_id: str) -> Episode:
            teacher = ScriptedTeacher(
                task, seed=_number(group_id) + self.config.seed, config=self.config.sft.teacher
            )
            policy = TeacherPolicy(teacher, self._encode)
            return await self._play(task, policy, group_id, episode_id)

        items = [Item(f"{name}-{n:05d}", tasks[n % len(tasks)]) for n in range(num_episodes)]
        return await self._sweep(name, items, play)

    async def evaluate(self, name: str, tasks: list[Task], temperature: float) -> list[Episode]:
        """One attempt at each task by the engines' policy, kept in episodes/NAME.jsonl."""
        sampling = self.config.rollout.sampling.model_copy(update={"temperature": temperature})
        policy = EnginePolicy(self.engines, sampling)

        async def play(task: Task, group_id: str, episode_id: str) -> Episode:
            return await self._play(task, policy, group_id, episode_id)

        return await self._sweep(name, [Item(f"{name}-{n:05d}", task) for n, task in enumerate(tasks)], play)

    async def start_training(self, tasks: list[Task], state: dict[str, Any] | None) -> dict[str, Any]:
        """Admit groups over `tasks`, at first or after an interruption; the state then. `release` starts them.

        state: of the worker, as this method or `commit` gave it; None at the beginning. Raises ConfigError when the tasks
        are not those of the state.
        """
        await self.stop_training()
        rollout = self.config.rollout
        sampler = make_sampler(
            [task.id for task in tasks],
            self.config.sampler,
            seed=self.config.seed,
            class_of={task.id: task.metadata["class"] for task in tasks if "class" in task.metadata},
        )
        scheduler = Scheduler(rollout.groups_per_step, rollout.max_policy_lag, options=rollout.scheduler)
        if state is not None:
            known = [*state["sampler"]["tasks"], *state.get("quarantined", ())]
            check_same_tasks(known, [task.id for task in tasks])
            sampler.load_state_dict(state["sampler"])
            scheduler = Scheduler.from_state_dict(state["scheduler"], rollout.scheduler)
        policy = WatchedPolicy(EnginePolicy(self.engines, rollout.sampling), self._engine_busy)
        self._family_of = {task.id: task.family for task in tasks}
        episodes = self.run_dir / "episodes"
        worker = RolloutWorker(
            rollout,
            {task.id: task for task in tasks},
            sampler,
            scheduler,
            EpisodeStore(episodes / "rl.jsonl"),
            lambda task, group_id, episode_id, on_request: self._play(
                task, policy, group_id, episode_id, on_request
            ),
            open_groups=OpenGroups(episodes / "rl_open"),
        )
        num_bytes = worker.restore(state or worker.state_dict())
        if num_bytes:
            log.warning("cut %d bytes of groups that do not follow from the run state", num_bytes)
        worker.hold()
        self.worker = worker
        return worker.state_dict()

    async def release(self) -> None:
        """The last state given is on disk, and its weights are out: admitted groups start."""
        assert self.worker is not None, "start_training comes first"
        self.worker.release()

    async def next_batch(self) -> tuple[list[EpisodeGroup], dict[str, float]]:
        """Groups of the next step and what they say of the policy."""
        assert self.worker is not None, "start_training comes first"
        started = time.monotonic()
        groups = await self.worker.next_batch()
        values = batch_metrics(groups, self._family_of, self.worker.scheduler.version)
        estimates = self.worker.sampler.estimates() if hasattr(self.worker.sampler, "estimates") else {}
        draws = self.worker.sampler.num_draws
        values |= {
            "time/wait_s": time.monotonic() - started,
            "rollout/num_dropped_groups": float(self.worker.scheduler.num_dropped),
            "rollout/num_stale_groups": float(self.worker.scheduler.num_stale),
            "rollout/num_masked_groups": float(self.worker.scheduler.num_masked),
            "rollout/num_filtered_groups": float(self.worker.scheduler.num_filtered),
            "rollout/num_quarantined_tasks": float(len(self.worker.quarantined)),
            "sampler/num_seen": float(sum(count > 0 for count in draws.values())),
            "busy/desktops": self.player.busy.take(),
            "busy/engine": self._engine_busy.take(),
        }
        if estimates:
            values["sampler/ema_mean"] = sum(estimates.values()) / len(estimates)
        return groups, values

    async def commit(self, group_ids: list[str]) -> dict[str, Any]:
        """The step over these groups is done: the state after it, with `trained` (RolloutWorker.commit)."""
        assert self.worker is not None
        return self.worker.commit(group_ids)

    async def pid(self) -> int:
        """Process id."""
        return os.getpid()

    async def stop_training(self) -> None:
        """Cancel running groups; their desktops go back."""
        if self.worker is not None:
            await self.worker.stop()
            self.worker = None

    async def close(self) -> None:
        await self.stop_training()
        await self.desktops.close()

    async def _play(
        self,
        task: Task,
        policy: PolicyPort,
        group_id: str,
        episode_id: str,
        on_request: Callable[[], None] = lambda: None,
    ) -> Episode:
        self._running_since[episode_id] = (time.time(), time.monotonic())
        try:
            episode = await self.player.play(
                task, policy, group_id=group_id, episode_id=episode_id, on_request=on_request
            )
        finally:
            del self._running_since[episode_id]
        self._num_ended += 1
        return episode

    def _needs(self) -> Needs:
        """Images that stay when the store is full: training reads them, or their episode runs (or has just ended).

        File times follow the wall clock, which may have been set either way since an episode began.
        """
        now_s, now_mono = time.time(), time.monotonic()
        starts = [min(wall_s, now_s - (now_mono - mono_s)) for wall_s, mono_s in self._running_since.values()]
        since_s = min([now_s, *starts]) - JUST_ENDED_S
        return Needs(frozenset(needed_images(self.run_dir)), since_s)

    async def _sweep(self, name: str, items: list[Item], play: Any) -> list[Episode]:
        def note(done: int, total: int) -> None:
            self._progress = (done, total)

        try:
            return await sweep(
                items,
                play,
                EpisodeStore(self.run_dir / "episodes" / f"{name}.jsonl"),
                max_retries=self.config.rollout.max_infra_retries,
                num_workers=self.config.sandbox.num_desktops,
                progress=note,
            )
        finally:
            self._progress = (0, 0)

    def _encode(self, action: Action) -> tuple[int, ...]:
        return self.renderer.answer_ids(format_action(action, self.config.rollout.action_space.family))


def check_same_tasks(known: Sequence[str], given: Sequence[str]) -> None:
    """ConfigError, with the difference, when a run goes on with other tasks than it had."""
    gone, new = sorted(set(known) - set(given)), sorted(set(given) - set(known))
    if gone or new:
        parts = [f"{len(ids)} {what}, e.g. {ids[0]}" for ids, what in ((gone, "gone"), (new, "new")) if ids]
        raise ConfigError(
            f"the files of tasks.train hold other tasks than when this run began ({'; '.join(parts)}): bring them back, "
            "or start a new run_dir"
        )


def output_to(path: Path) -> None:
    """Standard output and error of this process go to the end of `path`."""
    with path.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _number(key: str) -> int:
    return int(key.rsplit("-", 1)[1])
