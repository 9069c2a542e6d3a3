"""Everything a run needs, started in order and ended in reverse: run directory, desktops, Ray, engines, trainer, logger."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from sandbox_cluster.cluster import LocalCluster
from sandbox_cluster.providers.preflight import check_machine
from slime_cua.config.run import RunConfig
from slime_cua.config.trainer import OptimizerConfig
from slime_cua.core.errors import ConfigError, InfrastructureError, SlimeCuaError
from slime_cua.core.types import Task
from slime_cua.data.images import ImageStore
from slime_cua.launch.console import Console
from slime_cua.launch.engines import make_fleet
from slime_cua.launch.failures import explained
from slime_cua.launch.guardian import Guardian
from slime_cua.launch.preflight import check_disk, check_inputs, check_room
from slime_cua.launch.ray_runtime import explain_loss, ray_runtime
from slime_cua.launch.run_dir import RunDir
from slime_cua.launch.trainer_group import RayTrainerGroup
from slime_cua.observability.logger import MetricsLogger
from slime_cua.observability.metrics import Axis

POLL_S = 1.0
STALL_MARGIN_S = 60.0
"""Beyond its deadlines an episode needs time to notice them and to give its desktop back."""


class Session:
    """A context manager. Engines and trainers are blocks inside it, since phases need different ones."""

    def __init__(self, config: RunConfig, guardian: Guardian | None = None) -> None:
        """guardian: told of folders that must not outlive the run."""
        self.config, self._guardian = config, guardian
        self.console = Console()
        self._stack = ExitStack()
        self._cluster: LocalCluster | None = None

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
        self.train_tasks, self.heldout_tasks = check_inputs(config)
        self.run = self._stack.enter_context(RunDir(config))
        self._stack.enter_context(explained(self.run.logs))
        self._stack.enter_context(self.console.record(self.run.logs / "driver.log"))
        check_disk(self.run.path, self.model)
        self.images = ImageStore(self.run.images)
        self.use_gpu = _has_gpu()
        gateway_url, token = self._desktops()
        self._start_ray()
        self.logger = MetricsLogger(
            self.run.path,
            project=config.log.project,
            wandb_mode=config.log.wandb_mode,
            config=config.model_dump(mode="json"),
            resume_steps=self._resume_steps(),
        )
        self._stack.callback(self.logger.close)
        self._start_rollout(gateway_url, token)

    def _desktops(self) -> tuple[str, str]:
        if self.config.sandbox.gateway_url:
            import os

            token = os.environ.get("SLIME_CUA_GATEWAY_TOKEN", "")
            if not token:
                raise ConfigError(
                    "sandbox.gateway_url is set: put the client's token into SLIME_CUA_GATEWAY_TOKEN"
                )
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
        engine = self.config.rollout.engine
        num_gpus = self.config.trainer.parallel.world_size
        num_gpus += engine.num_engines * engine.tp if engine.kind != "external" else 0
        self._stack.enter_context(
            ray_runtime(
                num_gpus_needed=num_gpus if self.use_gpu else 0,
                log_dir=self.run.logs,
                on_folder=self._guardian.remove_later if self._guardian else None,
            )
        )

    def _start_rollout(self, gateway_url: str, token: str) -> None:
        import ray

        from slime_cua.launch.rollout_actor import RolloutActor

        actor: Any = ray.remote(RolloutActor)
        self._rollout = actor.options(num_cpus=0, max_concurrency=64).remote(
            self.config.model_dump(mode="json"), str(self.model), gateway_url, token, str(self.run.path)
        )
        self._stack.callback(self._close_rollout)
        self.rollout("open")

    def _close_rollout(self) -> None:
        import ray

        try:
            ray.get(self._rollout.close.remote(), timeout=20.0)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            self.console.say("the rollout side did not close in time; its leases end by themselves")
        ray.kill(self._rollout)

    def rollout(self, method: str, *args: Any) -> Any:
        """Call the rollout actor and wait, at most rollout.call_timeout_s."""
        return self._ask(getattr(self._rollout, method).remote(*args), self.config.rollout.call_timeout_s)

    def play(self, method: str, *args: Any, what: str, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Call a method of the rollout actor that plays episodes; progress is shown, `meanwhile` is called.

        Raises InfrastructureError when no episode ended for as long as one may take: then something is stuck.
        """
        import ray

        call = getattr(self._rollout, method).remote(*args)
        limit_s = (
            self.config.sandbox.acquire_timeout_s + self.config.rollout.episode_timeout_s + STALL_MARGIN_S
        )
        num_before, moved = -1, time.monotonic()
        while not ray.wait([call], timeout=POLL_S)[0]:
            done, total, num_ended = self.rollout("progress")
            self.console.progress(f"{what}: {done} of {total}" if total else what)
            if self._cluster is not None:
                self._cluster.check()
            check_room(self.run.path)
            meanwhile()
            if num_ended != num_before:
                num_before, moved = num_ended, time.monotonic()
            elif time.monotonic() - moved > limit_s:
                raise InfrastructureError(
                    f"no episode ended within {limit_s:.0f} s (sandbox.acquire_timeout_s + rollout.episode_timeout_s): "
                    f"see {self.run.logs}/rollout.log and {self.run.path}/sandbox/*.log"
                )
        return self._ask(call, self.config.rollout.call_timeout_s)

    def _ask(self, call: Any, timeout_s: float) -> Any:
        import ray

        try:
            return ray.get(call, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise InfrastructureError(
                f"the rollout side did not answer within rollout.call_timeout_s = {timeout_s} s: see {self.run.logs}/rollout.log"
            ) from error
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, SlimeCuaError) else error) from None
        except ray.exceptions.RayActorError as error:
            raise explain_loss("the rollout side", f"{self.run.logs}/rollout.log", error) from error

    @contextmanager
    def engines(self, model: Path) -> Iterator[Any]:
        """The fleet with `model` as version 0, in use by the rollout side."""
        self.console.say(f"starting {self.config.rollout.engine.num_engines} engine(s) on {model}")
        fleet = make_fleet(
            self.config.rollout.engine,
            model,
            self.run.logs,
            use_gpu=self.use_gpu,
            on_change=lambda urls, version: self._rollout.set_engines.remote(urls, version),
        )
        with fleet:
            self.rollout("set_engines", fleet.serving(), 0)
            yield fleet
            self.rollout("set_engines", (), 0)

    @contextmanager
    def trainer(self, model: Path, optimizer: OptimizerConfig) -> Iterator[RayTrainerGroup]:
        """A trainer on `model` with a fresh optimiser."""
        parallel = self.config.trainer.parallel
        self.console.say(f"starting {parallel.world_size} trainer rank(s), TP={parallel.tp} DP={parallel.dp}")
        config = self.config.trainer.model_copy(update={"optimizer": optimizer})
        group = RayTrainerGroup(config, use_gpu=self.use_gpu, log_dir=self.run.logs)
        try:
            group.call("load", str(model))
            yield group
        finally:
            group.close()

    def step_tasks(self) -> list[Task]:
        if not self.train_tasks:
            raise ConfigError("tasks.train names no task: give folders or files of task JSON")
        return self.train_tasks

    def _resume_steps(self) -> dict[Axis, int]:
        """The last step of each axis that is done for good; what was logged beyond is done again."""
        checkpoint = self.run.latest_checkpoint()
        done: dict[Axis, int] = {"step": int(checkpoint.name.removeprefix("step_")) if checkpoint else 0}
        if self.run.phase_result("sft") is None:
            done["sft_step"] = -1
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
    import torch

    return torch.cuda.is_available()
