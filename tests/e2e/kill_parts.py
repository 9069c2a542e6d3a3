"""The real loop, rollout side, run state and checkpoints in one cheap process, with doubles at the borders: recorded
episodes instead of desktops and engines, one trainer rank in this process instead of Ray's.

Ways to die: at the n-th durable operation (write, sync, rename, unlink), half-written where it writes; by a signal from
outside; and parts that are lost while the driver lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from rollout.scheduler import GroupState
from rollout.worker import RolloutWorker
from slime_cua.config.algo import LossConfig
from slime_cua.config.rollout import CanaryConfig, RolloutConfig, SchedulerConfig
from slime_cua.config.run import FaultConfig, LogConfig, RunConfig
from slime_cua.config.trainer import OptimizerConfig, TrainerConfig
from slime_cua.core.actions import GuiAction
from slime_cua.core.types import Episode, ImageRef, Task, Turn
from slime_cua.data.episodes import EpisodeStore
from slime_cua.data.images import ImageStore
from slime_cua.launch.console import Console
from slime_cua.launch.faults import FaultLog
from slime_cua.launch.preflight import RunTasks
from slime_cua.launch.rollout_actor import RolloutActor
from slime_cua.launch.run_dir import RunDir
from slime_cua.launch.run_state import RunState
from slime_cua.launch.session import RolloutLost, Session
from slime_cua.launch.steady_trainer import SteadyTrainer
from slime_cua.launch.trainer_group import TrainerLost
from slime_cua.observability.logger import MetricsLogger
from slime_cua.trainer.rank import TrainerRank
from tests.numerics.tiny_models import IMAGE_TOKEN, VISION_END, VISION_START

TASKS = [Task(id=f"t{n}", instruction="", family="f") for n in range(5)]
SLOW_TASK = TASKS[0].id
EPISODE_S = 0.02
LIMIT_S = 120.0
STALE = ("wait", "mask", "drop", "wait")
"""rollout.scheduler.stale of the runs, in turn."""


def config_of(folder: Path, number: int = 0) -> RunConfig:
    """Eight steps of two groups of three episodes, a checkpoint every third. Odd numbers filter flat groups; every third
    takes the ratio against the weights that sampled, which the trainer keeps; what grows too old is waited for, masked or dropped."""
    return RunConfig(
        run_dir=str(folder / "run"),
        num_steps=8,
        save_every=3,
        rollout=RolloutConfig(
            groups_per_step=2,
            episodes_per_group=3,
            max_infra_retries=1,
            canary=CanaryConfig(every=0),
            scheduler=SchedulerConfig(
                stale=STALE[number % len(STALE)],
                filters_flat_groups=number % 2 == 1,
                max_filtered_per_step=2,
                max_task_failures=0,
            ),
        ),
        trainer=TrainerConfig(
            dtype="fp32",
            max_tokens_per_rank=2048,
            freeze_vision=False,
            steps_per_collection=2 if number % 3 == 1 else 1,
            optimizer=OptimizerConfig(lr=1e-3, warmup_steps=3, decay_steps=20),
        ),
        loss=LossConfig(
            name="grpo",
            aggregate="token",
            eps_low=0.2,
            eps_high=0.3,
            pi_old="behaviour" if number % 3 == 2 else "engine",
        ),
        faults=FaultConfig(max_failures=1000),
        log=LogConfig(wandb_mode="disabled"),
    )


def die_at(number: int, torn: random.Random) -> None:
    """This process ends at its `number`-th durable operation from now: before it, after it, or in the middle of a write."""
    left = number
    names = ("fsync", "replace", "rename", "unlink", "write", "ftruncate")
    real = {name: getattr(os, name) for name in names}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if name == "write":
                    real["write"](arguments[0], arguments[1][: torn.randrange(len(arguments[1]) + 1)])
                elif torn.random() < 0.5:
                    real[name](*arguments, **named)
                os._exit(9)
            return real[name](*arguments, **named)

        return call

    for name in names:
        setattr(os, name, wrapped(name))


class RecordedPlayer:
    """Episodes that follow from their id: three short turns, a score, sometimes no score. Stands for desktops and engines."""

    def __init__(
        self, images: ImageStore, known: set[str], worker: Callable[[], RolloutWorker | None]
    ) -> None:
        """known: episodes on disk; playing one of them again would be a loss."""
        self._images, self._known, self._worker = images, known, worker
        self._clock = random.Random(os.urandom(8))
        self.busy = SimpleNamespace(take=lambda: 0.0)

    async def play(
        self, task: Task, policy: Any, *, group_id: str, episode_id: str, on_request: Callable[[], None]
    ) -> Episode:
        assert episode_id not in self._known, f"{episode_id} is on disk and was played again"
        rng = random.Random(f"{task.id} {episode_id}")
        turns: list[Turn] = []
        for index in range(2):
            if turns:
                await self._grow_old(group_id, turns[0].response_versions[0])
            version = self._serving()
            on_request()
            await asyncio.sleep(EPISODE_S * self._clock.random())
            turns.append(self._turn(index, version, rng))
        is_lost = rng.random() < 0.15
        return Episode(
            episode_id=episode_id,
            group_id=group_id,
            task_id=task.id,
            turns=tuple(turns),
            reward=None if is_lost else float(rng.random() < 0.5),
            stop_reason="invalid" if is_lost else "terminated",
            error="SandboxError: as recorded" if is_lost else None,
            started_s=100.0,
            ended_s=100.0 + rng.randrange(1, 9),
        )

    def _serving(self) -> int:
        worker = self._worker()
        return worker.serving_version if worker else 0

    async def _grow_old(self, group_id: str, version: int) -> None:
        """The slow task's group goes on when a token of `version` is too old, unless steps wait for it. One group at a time:
        steps need the others."""
        worker = self._worker()
        assert worker is not None
        scheduler = worker.scheduler

        def is_slow(group: GroupState) -> bool:
            is_waited_for = scheduler.options.stale != "mask" and group.is_protected
            return group.task_id == SLOW_TASK and not group.is_finished and not is_waited_for

        while worker.serving_version <= version + scheduler.max_policy_lag:
            slow = next((group.group_id for group in scheduler.groups.values() if is_slow(group)), None)
            if slow != group_id:
                return
            await asyncio.sleep(EPISODE_S)

    def _turn(self, index: int, version: int, rng: random.Random) -> Turn:
        context = [rng.randrange(20, 300) for _ in range(3)]
        shown: tuple[ImageRef, ...] = ()
        if rng.random() < 0.3:
            context += [VISION_START, IMAGE_TOKEN, VISION_END]
            shown = (self._images.put(picture(rng.randrange(4))),)
        ids = tuple(rng.randrange(20, 300) for _ in range(4))
        return Turn(
            index=index,
            starts_segment=index == 0,
            context_ids=tuple(context),
            context_images=shown,
            response_ids=ids,
            response_logp=tuple(-5.9 + 0.1 * rng.random() for _ in ids),
            response_versions=(version,) * len(ids),
            action=GuiAction(kind="left_click", point={"x": 1.0, "y": 2.0}),
        )


def picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


class RecordedRollout(RolloutActor):
    """The rollout side with a RecordedPlayer."""

    async def open(self) -> None:
        self.engines: Any = None
        self.player: Any = RecordedPlayer(
            ImageStore(self.run_dir / "images"),
            recorded(self.run_dir),
            lambda: self.worker,
        )

    async def set_engines(self, urls: Sequence[str], min_version: int) -> None:
        return


class ActorDouble:
    """Ray's handle of an actor: methods run on the event loop of a thread, which can be gone from one moment to the next."""

    def __init__(self, actor: RolloutActor) -> None:
        self._actor = actor
        self._loop = asyncio.new_event_loop()
        self._pending: set[Future[Any]] = set()
        self._is_lost = False
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(name, arguments))

    def _call(self, name: str, arguments: Sequence[Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._pending.add(future)
        if self._is_lost:
            future.set_exception(RolloutLost("killed"))
            return future

        async def run() -> None:
            try:
                answer = await getattr(self._actor, name)(*arguments)
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(answer)

        asyncio.run_coroutine_threadsafe(run(), self._loop)
        return future

    def lose(self) -> None:
        """Nothing of it runs from here on, not even its clean-up."""
        self._is_lost = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        while self._loop.is_running():
            time.sleep(0.001)
        for future in self._pending:
            with contextlib.suppress(Exception):
                future.set_exception(RolloutLost("killed"))


class OneRank:
    """`launch.steady_trainer.Group` of one rank in this process."""

    def __init__(self, config: TrainerConfig, model: Path, is_lost_now: Callable[[], bool]) -> None:
        self.rank = TrainerRank(config)
        self._is_lost_now = is_lost_now
        self.rank.load(model)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        if self._is_lost_now():
            raise TrainerLost(f"killed before {method}")
        answer = getattr(self.rank, method)(*arguments, **named)
        if self._is_lost_now():
            raise TrainerLost(f"killed after {method}")
        return answer

    def publish(self, version: int, urls: Sequence[str], plan: Any) -> Any:
        if self._is_lost_now():
            raise TrainerLost("killed before the publish")
        return SimpleNamespace(engines=("engine",), folder=None, seconds={"paused": 0.0})

    def close(self) -> None:
        self.rank.close()


class Fleet:
    """Engines that take every version, but only versions that the run state has. `history` gets a line for each: which groups
    the state holds, of which a group that was dropped while it ran leaves no other trace."""

    def __init__(self, run_dir: Path, history: Path) -> None:
        self._run_dir, self._history = run_dir, history

    def reachable(self) -> tuple[str, ...]:
        return ("engine",)

    serving = reachable

    def published(self, version: int, urls: Sequence[str], folder: Path | None = None) -> None:
        state = RunState.load(self._run_dir)
        assert state is not None and state.version == version, "weights are out that a crash would take away"
        assert state.rollout is not None
        held = [group["group_id"] for group in state.rollout["scheduler"]["groups"]]
        with self._history.open("a") as file:
            file.write("\n" + json.dumps({"version": version, "groups": held}) + "\n")


def held_groups(history: Path) -> dict[int, set[str]]:
    """By version, the groups that its step left: a version's first whole line, since later starts write others."""
    found: dict[int, set[str]] = {}
    for line in history.read_text().splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            found.setdefault(entry["version"], set(entry["groups"]))
    return found


class OneProcessSession(Session):
    """A Session without Ray, desktops and W&B. `losses` says at which calls trainer or rollout side are lost; `counter`: a
    file that gets a byte for each."""

    def __init__(self, config: RunConfig, model: Path, losses: random.Random | None, counter: Path) -> None:
        super().__init__(config)
        self.model, self._counter = model, counter
        self._losses: random.Random | None = None
        self._later_losses = losses

    def _start(self) -> None:
        self.tasks = RunTasks(list(TASKS), list(TASKS), [])
        self.run = self._stack.enter_context(RunDir(self.config))
        self.console = Console()
        self._stack.enter_context(self.console.record(self.run.logs / "driver.log"))
        self.images = ImageStore(self.run.images)
        self.use_gpu = False
        self.faults = FaultLog(self.config.faults, self.run.logs)
        self._gateway = ("", "")
        self.logger = MetricsLogger(self.run.path, wandb_mode="disabled", resume_steps=self._resume_steps())
        self._start_rollout()
        self._losses = self._later_losses

    def _start_rollout(self) -> None:
        actor = RecordedRollout(
            self.config.model_dump(mode="json"), str(self.model), *self._gateway, str(self.run.path)
        )
        self._rollout: Any = ActorDouble(actor)
        self._ask(self._rollout.open.remote(), LIMIT_S)

    def _restart_rollout(self) -> None:
        self._start_rollout()
        super()._bring_up_rollout()

    def _ask(self, call: Any, timeout_s: float) -> Any:
        if self._is_lost_now(0.03):
            self._rollout.lose()
        answer = call.result(timeout_s)
        if self._is_lost_now(0.03):
            self._rollout.lose()
            raise RolloutLost("killed after its answer")
        return answer

    def _play(self, method: str, args: Sequence[Any], what: str, meanwhile: Callable[[], None]) -> Any:
        return self._ask(getattr(self._rollout, method).remote(*args), LIMIT_S)

    def _is_lost_now(self, share: float) -> bool:
        is_lost = self._losses is not None and self._losses.random() < share
        if is_lost:
            with self._counter.open("ab") as file:
                file.write(b".")
        return is_lost

    @contextlib.contextmanager
    def trainer(self, model: Path, optimizer: OptimizerConfig) -> Any:
        trainer = SteadyTrainer(
            lambda: OneRank(self.config.trainer, model, lambda: self._is_lost_now(0.03)),
            self.faults,
            self.console.say,
            self.run.logs,
        )
        try:
            yield trainer
        finally:
            trainer.close()


def recorded(run_dir: Path) -> set[str]:
    """Ids of the episodes on disk."""
    found = {e.episode_id for group in EpisodeStore(run_dir / "episodes/rl.jsonl") for e in group.episodes}
    for path in (run_dir / "episodes/rl_open").glob("*.jsonl"):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                found.add(Episode.model_validate_json(line).episode_id)
    return found


def facts(rank: TrainerRank) -> dict[str, Any]:
    """Weights, optimiser and its step of a rank, as digests: equal when every bit is."""
    found = {name: digest(p) for name, p in rank.model.module.named_parameters()}
    for number, part in enumerate(
        getattr(rank.optimizer.megatron, "chained_optimizers", [rank.optimizer.megatron])
    ):
        state = part.optimizer.state_dict()["state"]
        for key, values in sorted(state.items()):
            found |= {f"optimizer {number} {key} {name}": digest(value) for name, value in values.items()}
    return found | {"steps": rank.optimizer.num_steps}


def digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return hashlib.sha256(value.detach().cpu().contiguous().view(-1).numpy().tobytes()).hexdigest()
