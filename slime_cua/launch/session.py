"""Everything a run needs, started in order and ended in reverse: run directory, desktops, Ray, engines, trainer, logger."""

from __future__ import annotations

import ctypes
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from sandbox_cluster.cluster import LocalCluster
from sandbox_cluster.host.pool import MIN_FREE_DISK_BYTES
from sandbox_cluster.providers.preflight import check_machine
from slime_cua.config.run import RunConfig
from slime_cua.config.trainer import OptimizerConfig
from slime_cua.core.errors import ConfigError, InfrastructureError, SlimeCuaError
from slime_cua.core.types import Task
from slime_cua.data.images import ImageStore
from slime_cua.launch.console import Console
from slime_cua.launch.engines import make_fleet
from slime_cua.launch.failures import explained
from slime_cua.launch.faults import FaultLog
from slime_cua.launch.guardian import Guardian
from slime_cua.launch.preflight import (
    LEAST_BYTES,
    check_disk,
    check_gateway,
    check_inputs,
    check_room,
    host_complaints,
)
from slime_cua.launch.ray_runtime import end_actor, explain_loss, ray_runtime
from slime_cua.launch.run_dir import RunDir
from slime_cua.launch.run_state import RunState, SftState
from slime_cua.launch.steady_trainer import SteadyTrainer
from slime_cua.launch.trainer_group import RayTrainerGroup
from slime_cua.observability.logger import MetricsLogger
from slime_cua.observability.metrics import Axis
from slime_cua.trainer.publish_ways import PublishPlan

T = TypeVar("T")
POLL_S = 1.0
LOOK_S = 20.0
"""When no episode has ended for so long, what the hosts complain of is shown."""
STALL_MARGIN_S = 60.0
"""Beyond its deadlines an episode needs time to notice them and to give its desktop back."""


class RolloutLost(InfrastructureError):
    """The rollout actor died or does not answer: a new one can go on."""


class Session:
    """A context manager. Engines and trainers are blocks inside it, since phases need different ones."""

    def __init__(self, config: RunConfig, guardian: Guardian | None = None) -> None:
        """guardian: told of folders that must not outlive the run."""
        self.config, self._guardian = config, guardian
        self.console = Console()
        self._stack = ExitStack()
        self._cluster: LocalCluster | None = None
        self._fleet: Any = None
        self._num_engine_losses = 0
        self._engines: tuple[tuple[str, ...], int] = ((), 0)
        self._after_restart: Callable[[], None] | None = None
        self._is_restarting = False

    def __enter__(self) -> Session:
        try:
            self._start()
        except BaseException:
            if not self._stack.__exit__(*sys.exc_info()):
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _start(self) -> None:
        config = self.config
        self.model = Path(config.model)
        self.tasks = check_inputs(config)
        self.run = self._stack.enter_context(RunDir(config))
        self._stack.enter_context(explained(self.run.logs))
        self._stack.enter_context(self.console.record(self.run.logs / "driver.log"))
        self.images = ImageStore(self.run.images)
        goes_on = self._rl_goes_on()
        if self._is_finished() and not goes_on:
            self.console.say("every phase is done: nothing is started, the table is from what is stored")
            return
        check_disk(self.run.path, self.model)
        if goes_on:
            self._reopen_rl()
        self.use_gpu = _has_gpu()
        self.faults = FaultLog(config.faults, self.run.logs)
        self._gateway = self._desktops()
        self._start_ray()
        self.logger = MetricsLogger(
            self.run.path,
            project=config.log.project,
            wandb_mode=config.log.wandb_mode,
            config=config.model_dump(mode="json"),
            resume_steps=self._resume_steps(),
        )
        self._stack.callback(self.logger.close)
        self._start_rollout()
        self._stack.callback(self._close_rollout)

    def _desktops(self) -> tuple[str, str]:
        if self.config.sandbox.gateway_url:
            import os

            token = os.environ.get("SLIME_CUA_GATEWAY_TOKEN", "")
            if not token:
                raise ConfigError(
                    "sandbox.gateway_url is set: put the client's token into SLIME_CUA_GATEWAY_TOKEN"
                )
            check_gateway(self.config.sandbox.gateway_url, self.config.sandbox.acquire_timeout_s)
            return self.config.sandbox.gateway_url, token
        if self.config.sandbox.provider == "local":
            check_machine(self.config.sandbox)
        self.console.say(f"starting a gateway and a host with {self.config.sandbox.num_desktops} desktops")
        self._cluster = LocalCluster(self.config.sandbox, self.run.path / "sandbox")
        self._stack.enter_context(self._cluster)
        self._stack.enter_context(self._cluster.watched())
        return self._cluster.url, self._cluster.token

    def _start_ray(self) -> None:
        self.console.say("starting Ray")
        self._stack.enter_context(
            ray_runtime(
                num_gpus_needed=self.num_gpus if self.use_gpu else 0,
                log_dir=self.run.logs,
                on_folder=self._guardian.remove_later if self._guardian else None,
            )
        )

    def _start_rollout(self) -> None:
        import ray

        from slime_cua.launch.rollout_actor import RolloutActor

        actor: Any = ray.remote(RolloutActor)
        self._rollout = actor.options(num_cpus=0, max_concurrency=64).remote(
            self.config.model_dump(mode="json"), str(self.model), *self._gateway, str(self.run.path)
        )
        self._rollout_pid = 0
        timeout_s = self.config.rollout.call_timeout_s
        self._rollout_pid = self._ask(self._rollout.pid.remote(), timeout_s)
        self._ask(self._rollout.open.remote(), timeout_s)

    def _close_rollout(self) -> None:
        import ray

        try:
            ray.get(self._rollout.close.remote(), timeout=20.0)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            self.console.say("the rollout side did not close in time; its leases end by themselves")
        ray.kill(self._rollout)

    def on_rollout_restart(self, work: Callable[[], None] | None) -> None:
        """What else a new rollout side needs to be where the lost one was; None: nothing."""
        self._after_restart = work

    def set_engines(self, urls: Sequence[str], min_version: int) -> None:
        """Engines for the rollout side; answers from older weights are not taken."""
        self._engines = (tuple(urls), min_version)
        self.rollout("set_engines", *self._engines)

    def rollout(self, method: str, *args: Any) -> Any:
        """Call the rollout actor and wait, at most rollout.call_timeout_s. A lost one is started again, and called again."""
        return self._steadily(
            method,
            lambda: self._ask(
                getattr(self._rollout, method).remote(*args), self.config.rollout.call_timeout_s
            ),
        )

    def play(self, method: str, *args: Any, what: str, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Call a method of the rollout actor that plays episodes; progress is shown, `meanwhile` is called.

        Raises InfrastructureError when no episode ended for as long as one may take: then something is stuck.
        """
        return self._steadily(method, lambda: self._play(method, args, what, meanwhile))

    def _play(self, method: str, args: Sequence[Any], what: str, meanwhile: Callable[[], None]) -> Any:
        import ray

        call = getattr(self._rollout, method).remote(*args)
        timeout_s = self.config.rollout.call_timeout_s
        limit_s = (
            self.config.sandbox.acquire_timeout_s + self.config.rollout.episode_timeout_s + STALL_MARGIN_S
        )
        num_before, moved = -1, time.monotonic()
        looked, told = moved, ""
        while not ray.wait([call], timeout=POLL_S)[0]:
            done, total, num_ended = self._ask(self._rollout.progress.remote(), timeout_s)
            self.console.progress(f"{what}: {done} of {total}" if total else what)
            self._check_parts()
            check_room(self.run.path, MIN_FREE_DISK_BYTES if self._cluster is not None else LEAST_BYTES)
            meanwhile()
            if num_ended != num_before:
                num_before, moved = num_ended, time.monotonic()
                looked = moved
            elif time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                complaints = host_complaints(*self._gateway)
                if complaints and complaints != told:
                    told = complaints
                    self.console.say(f"{what}: no desktop comes free; hosts say: {complaints}")
            elif time.monotonic() - moved > limit_s:
                raise InfrastructureError(
                    f"no episode ended within {limit_s:.0f} s (sandbox.acquire_timeout_s + rollout.episode_timeout_s): "
                    f"see {self.run.logs}/rollout.log and {self.run.path}/sandbox/*.log"
                )
        return self._ask(call, timeout_s)

    def _steadily(self, what: str, work: Callable[[], T]) -> T:
        """`work`, again after each loss of the rollout side. Raises InfrastructureError when that happens too often.

        A loss while a new one is being brought up is for whoever brings it up.
        """
        while True:
            used = self._rollout
            try:
                return work()
            except RolloutLost as error:
                if self._is_restarting:
                    raise
                if self._rollout is not used:
                    continue  # lost and replaced by a call inside `work`
                lost: RolloutLost | None = error
            while lost is not None:
                self.console.say(f"the rollout side was lost in {what}: {lost}")
                self.faults.record("rollout", f"{what}: {lost}", self.run.logs / "rollout.log")
                try:
                    self._restart_rollout()
                    lost = None
                except RolloutLost as error:
                    lost = error

    def _restart_rollout(self) -> None:
        end_actor(self._rollout, self._rollout_pid)
        self._start_rollout()
        self._bring_up_rollout()

    def _bring_up_rollout(self) -> None:
        """A new rollout side comes to where the lost one was."""
        self._ask(self._rollout.set_engines.remote(*self._engines), self.config.rollout.call_timeout_s)
        if self._after_restart is not None:
            self._is_restarting = True
            try:
                self._after_restart()
            finally:
                self._is_restarting = False

    def _check_parts(self) -> None:
        """Count what others mended since the last look; SandboxError when the desktops are gone for good."""
        if self._cluster is not None:
            self._cluster.check()
            for name in self._cluster.take_restarts():
                self.faults.record(name, f"the sandbox {name} died", self.run.path / f"sandbox/{name}.log")
        if self._fleet is not None:
            num_losses = self._fleet.losses()
            for _ in range(num_losses - self._num_engine_losses):
                self.faults.record("engine", "an engine died or hung", self.run.logs / "engine_*.log")
            self._num_engine_losses = num_losses

    def _ask(self, call: Any, timeout_s: float) -> Any:
        import ray

        try:
            return ray.get(call, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise RolloutLost(
                f"the rollout side did not answer within rollout.call_timeout_s = {timeout_s} s: see {self.run.logs}/rollout.log"
            ) from error
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, SlimeCuaError) else error) from None
        except ray.exceptions.RayActorError as error:
            raise RolloutLost(
                str(explain_loss("the rollout side", f"{self.run.logs}/rollout.log", error))
            ) from error

    @contextmanager
    def engines(self, model: Path) -> Iterator[Any]:
        """The fleet with `model` as version 0, in use by the rollout side."""
        self.console.say(f"starting {self.config.rollout.engine.num_engines} engine(s) on {model}")
        fleet = make_fleet(
            self.config.rollout.engine,
            model,
            self.run.logs,
            gpu_share=self.publish_plan.gpu_share if self.use_gpu else 0.0,
            on_change=self._engines_changed,
        )
        with fleet:
            self._fleet, self._num_engine_losses = fleet, 0
            self.set_engines(fleet.serving(), 0)
            yield fleet
            self._fleet = None
            self.set_engines((), 0)

    def _engines_changed(self, urls: tuple[str, ...], version: int) -> None:
        """From a thread of the fleet's: tell, and do not wait. Goes to the rollout side of the moment."""
        self._engines = (urls, version)
        self._rollout.set_engines.remote(urls, version)

    @contextmanager
    def trainer(self, model: Path, optimizer: OptimizerConfig) -> Iterator[SteadyTrainer]:
        """A trainer on `model` with a fresh optimiser."""
        parallel = self.config.trainer.parallel
        self.console.say(f"starting {parallel.world_size} trainer rank(s), TP={parallel.tp} DP={parallel.dp}")
        config = self.config.trainer.model_copy(update={"optimizer": optimizer})

        def start() -> RayTrainerGroup:
            num_gpus = self.publish_plan.gpu_share if self.use_gpu else 0.0
            group = RayTrainerGroup(config, num_gpus=num_gpus, log_dir=self.run.logs)
            try:
                group.call("load", str(model))
            except BaseException:
                group.close()
                raise
            return group

        trainer = SteadyTrainer(start, self.faults, self.console.say, self.run.logs)
        try:
            yield trainer
        finally:
            trainer.close()

    @property
    def publish_plan(self) -> PublishPlan:
        """How this run's weights come to its engines."""
        rollout = self.config.rollout
        return PublishPlan(rollout.publish, self.use_gpu, rollout.engine.tp, self.run.path / "weights")

    @property
    def num_gpus(self) -> int:
        """GPUs that trainer and engines take, where there are GPUs."""
        engine = self.config.rollout.engine
        num_ranks = self.config.trainer.parallel.world_size
        num_ranks += engine.num_engines * engine.tp if engine.kind != "external" else 0
        return math.ceil(num_ranks * self.publish_plan.gpu_share)

    def is_rl_unfinished(self) -> bool:
        """RL has steps to do."""
        return self.config.num_steps > 0 and self.run.phase_result("rl") is None

    def _is_finished(self) -> bool:
        """Every phase that the config asks for is done: what is left is to print what was found."""
        config = self.config
        wanted = [f"eval_{arm}" for arm in config.evaluation.arms if arm != "rl" or config.num_steps]
        wanted += ["sft"] if config.sft.num_episodes else []
        wanted += ["rl"] if config.num_steps else []
        return bool(wanted) and all(self.run.phase_result(name) is not None for name in wanted)

    def _rl_goes_on(self) -> bool:
        """A finished RL phase goes on when num_steps (or minutes) were raised since."""
        config, done = self.config, self.run.phase_result("rl")
        if done is None or done["num_steps"] >= config.num_steps:
            return False
        if config.minutes and done["seconds"] > 60 * config.minutes:
            self.console.say(
                f"RL ended at step {done['num_steps']:.0f} of {config.num_steps}, when its {config.minutes:g} minutes were over: "
                "raise minutes (0: no limit) to go on"
            )
            return False
        return True

    def _reopen_rl(self) -> None:
        done = self.run.phase_result("rl")
        assert done is not None
        self.console.say(f"RL goes on from step {done['num_steps']:.0f} to {self.config.num_steps}")
        self.run.reopen_phase("rl", f"step_{done['num_steps']:.0f}")

    def _resume_steps(self) -> dict[Axis, int]:
        """The last step of each axis that is done for good; what was logged beyond is done again."""
        state = RunState.load(self.run.path)
        done: dict[Axis, int] = {"step": state.version if state else 0}
        if self.run.phase_result("sft") is None:
            cold = SftState.load(self.run.path)
            done["sft_step"] = (cold.step if cold else 0) - 1
        if self.run.phase_result("eval_rl") is None:
            done["eval"] = 1
        return done


def evenly(tasks: Sequence[Task], count: int = 0) -> list[Task]:
    """`count` tasks (0: all), families in turn; the order depends on `tasks` alone."""
    families: dict[str, list[Task]] = {}
    for task in tasks:
        families.setdefault(task.family, []).append(task)
    rounds = itertools.zip_longest(*families.values())
    chosen = [task for members in rounds for task in members if task is not None]
    return chosen[:count] if count else chosen


def _has_gpu() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False  # no driver; torch, which would say the same, takes seconds to import
    import torch

    return torch.cuda.is_available()
