"""Everything a run needs, started in order and ended in reverse: run directory, desktops, Ray, engines, trainer, logger."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from sandbox_cluster.cluster import LocalCluster
from sandbox_cluster.tasks.loader import load_tasks
from slime_cua.config.run import RunConfig
from slime_cua.config.trainer import OptimizerConfig
from slime_cua.core.errors import ConfigError, InfrastructureError, SlimeCuaError
from slime_cua.core.types import Task
from slime_cua.data.images import ImageStore
from slime_cua.launch.console import Console
from slime_cua.launch.engines import make_fleet
from slime_cua.launch.ray_runtime import ray_runtime
from slime_cua.launch.run_dir import RunDir
from slime_cua.launch.trainer_group import RayTrainerGroup
from slime_cua.observability.logger import MetricsLogger

POLL_S = 1.0


class Session:
    """A context manager. Engines and trainers are blocks inside it, since phases need different ones."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.console = Console()
        self._stack = ExitStack()
        self._urls: tuple[str, ...] = ()

    def __enter__(self) -> Session:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        config = self.config
        self.model = Path(config.model)
        if not (self.model / "config.json").is_file():
            raise ConfigError(
                f"model = {config.model!r}: no Hugging Face checkpoint is there (config.json is missing)"
            )
        self.train_tasks = load_tasks(config.tasks.train) if config.tasks.train else []
        self.heldout_tasks = load_tasks(config.tasks.heldout) if config.tasks.heldout else []
        self.run = self._stack.enter_context(RunDir(config))
        self.images = ImageStore(self.run.images)
        self.use_gpu = _has_gpu()
        gateway_url, token = self._desktops()
        self._start_ray()
        self.logger = MetricsLogger(
            self.run.path,
            project=config.log.project,
            wandb_mode=config.log.wandb_mode,
            config=config.model_dump(mode="json"),
            resume_step=self._resume_step(),
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
        self.console.say(f"starting a gateway and a host with {self.config.sandbox.num_desktops} desktops")
        cluster = self._stack.enter_context(LocalCluster(self.config.sandbox, self.run.path / "sandbox"))
        return cluster.url, cluster.token

    def _start_ray(self) -> None:
        self.console.say("starting Ray")
        engine = self.config.rollout.engine
        num_gpus = self.config.trainer.parallel.world_size
        num_gpus += engine.num_engines * engine.tp if engine.kind != "external" else 0
        self._stack.enter_context(
            ray_runtime(num_gpus_needed=num_gpus if self.use_gpu else 0, log_dir=self.run.logs)
        )

    def _start_rollout(self, gateway_url: str, token: str) -> None:
        import ray

        from slime_cua.launch.rollout_actor import RolloutActor

        actor: Any = ray.remote(RolloutActor)
        self._rollout = actor.options(num_cpus=0, max_concurrency=64).remote(
            self.config.model_dump(mode="json"), str(self.model), gateway_url, token, str(self.run.path)
        )
        self._stack.callback(self._close_rollout)

    def _close_rollout(self) -> None:
        import ray

        try:
            ray.get(self._rollout.close.remote(), timeout=20.0)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            self.console.say("the rollout side did not close in time; its leases end by themselves")
        ray.kill(self._rollout)

    def rollout(self, method: str, *args: Any, what: str = "", timeout_s: float | None = None) -> Any:
        """Call the rollout actor and wait; with `what`, progress is shown meanwhile."""
        import ray

        call = getattr(self._rollout, method).remote(*args)
        deadline = time.monotonic() + timeout_s if timeout_s else None
        while not ray.wait([call], timeout=POLL_S)[0]:
            if what:
                done, total = ray.get(self._rollout.progress.remote())
                self.console.progress(f"{what}: {done} of {total}")
            if deadline is not None and time.monotonic() > deadline:
                raise InfrastructureError(f"the rollout side did not finish {method} within {timeout_s} s")
        try:
            return ray.get(call)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, SlimeCuaError) else error) from None
        except ray.exceptions.RayActorError as error:
            raise InfrastructureError(f"the rollout actor died: {error}") from error

    @contextmanager
    def engines(self, model: Path) -> Iterator[Any]:
        """The fleet with `model` as version 0, in use by the rollout side."""
        self.console.say(f"starting {self.config.rollout.engine.num_engines} engine(s) on {model}")
        fleet = make_fleet(self.config.rollout.engine, model, self.run.logs, use_gpu=self.use_gpu)
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

    def _resume_step(self) -> int | None:
        checkpoint = self.run.latest_checkpoint()
        return int(checkpoint.name.removeprefix("step_")) if checkpoint else None


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
