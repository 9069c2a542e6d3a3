"""The trainer's ranks as Ray actors: one a GPU, or one a process on CPU. Every call goes to all ranks at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_cua.config.trainer import TrainerConfig
from slime_cua.core.errors import EngineError, InfrastructureError, SlimeCuaError
from slime_cua.core.ports import free_port
from slime_cua.core.startup import heavy_imports
from slime_cua.launch.ray_runtime import end_actor, explain_loss
from slime_cua.trainer import progress
from slime_cua.trainer.publish_ways import PublishPlan, make_publisher

if TYPE_CHECKING:
    from slime_cua.trainer.publish_report import PublishReport

DEATH_NEWS_S = 5.0
"""Ray needs a moment to see that a process is gone."""
POLL_S = 0.5
SILENT = ("load", "restore")
"""Methods that read for minutes without a mark of progress: trainer.restart_timeout_s is their deadline."""
FOREIGN_LOSSES = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset by peer",
    "timed out waiting",
)
"""In the text of a rank's error: another rank, or the network between them, is gone."""


class TrainerLost(InfrastructureError):
    """A rank died or hangs: the group cannot go on, a new one can."""


class TrainerActor:
    """Wraps a TrainerRank; built inside the actor, so that the driver never imports megatron."""

    def __init__(self, config: dict[str, Any], rank: int, log_path: str) -> None:
        with Path(log_path).open("ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        progress.open_file(progress_file(Path(log_path)))
        self._config = TrainerConfig.model_validate(config)
        self._rank = rank
        self._trainer: Any = None
        self._publisher: Any = None
        self._address = "127.0.0.1"

    def address(self) -> tuple[str, int]:
        """(host, free port) of this rank, for the rendezvous."""
        import ray

        return ray.util.get_node_ip_address(), free_port("")

    def pid(self) -> int:
        """Process id."""
        return os.getpid()

    def initialise(self, world_size: int, address: tuple[str, int]) -> None:
        self._address = address[0]
        progress.mark("joining the other ranks")
        with heavy_imports():
            import megatron_patches
            from slime_cua.trainer.rank import TrainerRank

            megatron_patches.apply()
        self._trainer = TrainerRank(
            self._config,
            rank=self._rank,
            world_size=world_size,
            master_addr=address[0],
            master_port=address[1],
        )
        progress.mark("joined")

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        progress.mark(f"{method}: begun")
        answer = getattr(self._trainer, method)(*args, **kwargs)
        progress.mark(f"{method}: done")
        return answer

    def publish(self, version: int, urls: list[str], plan: PublishPlan) -> Any:
        """Weights to the engines; every rank takes part in gathering them, rank 0 sends."""
        progress.mark(f"publish of version {version}: begun")
        tensors = self._trainer.named_hf_tensors()
        if self._rank != 0:
            for _ in tensors:
                pass
            progress.mark("publish: gathered")
            return None
        if self._publisher is None:
            # an engine that hangs is named before the rank is
            self._publisher = make_publisher(plan, self._address, self._config.timeout_s / 2)
        report = self._publisher.publish(tensors, version, urls)
        progress.mark("publish: done")
        return report


class RayTrainerGroup:
    """All ranks of one trainer. `call` returns rank 0's result; a lost rank or a passed deadline is a TrainerLost."""

    def __init__(self, config: TrainerConfig, *, num_gpus: float, log_dir: Path) -> None:
        """num_gpus: of each rank; 0 on CPU."""
        import ray

        self._config, self._log_dir = config, log_dir
        self.world_size = config.parallel.world_size
        logs = [log_dir / f"trainer_{rank}.log" for rank in range(self.world_size)]
        self._progress = [progress_file(path) for path in logs]
        for path in self._progress:
            path.unlink(missing_ok=True)
        actor: Any = ray.remote(num_cpus=0, num_gpus=num_gpus, max_restarts=0)(TrainerActor)
        self._ranks: list[Any] = [
            actor.remote(config.model_dump(mode="json"), rank, str(path)) for rank, path in enumerate(logs)
        ]
        self._pids: list[int] = []
        try:
            limit_s = config.restart_timeout_s
            self._pids = self._get([rank.pid.remote() for rank in self._ranks], limit_s)
            address = self._get([self._ranks[0].address.remote()], limit_s)[0]
            self._get([rank.initialise.remote(self.world_size, address) for rank in self._ranks], limit_s)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run `method` on every rank with the same arguments; rank 0's result."""
        limit_s = self._config.restart_timeout_s if method in SILENT else 0.0
        return self._get([rank.call.remote(method, *args, **kwargs) for rank in self._ranks], limit_s)[0]

    def publish(self, version: int, urls: Sequence[str], plan: PublishPlan) -> PublishReport:
        """The current weights to `urls` as `version`; what each engine said. Raises EngineError when none took them."""
        calls = [rank.publish.remote(version, list(urls), plan) for rank in self._ranks]
        report: PublishReport = self._get(calls)[0]
        if not report.engines:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in report.failures.items())
            raise EngineError(f"no engine took version {version}: {reasons}")
        return report

    def close(self) -> None:
        """End all ranks, also those that hang."""
        for index, rank in enumerate(self._ranks):
            end_actor(rank, self._pids[index] if index < len(self._pids) else 0)

    def _get(self, refs: list[Any], timeout_s: float = 0.0) -> list[Any]:
        """Results of all ranks. timeout_s: for the whole call; 0: trainer.timeout_s without progress on any rank."""
        import ray

        key = "restart_timeout_s" if timeout_s else "timeout_s"
        watch = Watch(self._progress, timeout_s or self._config.timeout_s, is_total=timeout_s > 0)
        waiting = list(refs)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
            for ref in ready:
                self._check(ref, refs)
            if waiting and watch.is_over():
                raise TrainerLost(
                    f"the trainer hangs: no progress within trainer.{key} = {watch.timeout_s:g} s; {watch.report()}; "
                    f"see {self._log_dir}/trainer_*.log"
                )
        return list(ray.get(refs))

    def _check(self, ref: Any, refs: list[Any]) -> None:
        """Raise the error of a finished call, if it ended with one."""
        import ray

        try:
            ray.get(ref, timeout=self._config.timeout_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SlimeCuaError):
                raise error.cause from None
            self._check_alive(refs)
            text = str(error).lower()
            if any(word in text for word in FOREIGN_LOSSES):
                raise self._loss(error) from error
            raise
        except ray.exceptions.RayActorError as error:
            raise self._loss(error) from error

    def _check_alive(self, refs: list[Any]) -> None:
        """When a rank dies, the others may complain first: say who died, not who complained."""
        import ray

        ray.wait(refs, num_returns=len(refs), timeout=DEATH_NEWS_S)
        for ref in refs:
            try:
                ray.get(ref, timeout=0)
            except ray.exceptions.RayActorError as error:
                raise self._loss(error) from error
            except ray.exceptions.RayError:
                continue

    def _loss(self, error: BaseException) -> TrainerLost:
        return TrainerLost(str(explain_loss("a trainer rank", f"{self._log_dir}/trainer_*.log", error)))


class Watch:
    """Whether ranks still make progress, by their marks (slime_cua.trainer.progress)."""

    def __init__(
        self,
        files: Sequence[Path],
        timeout_s: float,
        *,
        is_total: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """is_total: the deadline is for all of it, whatever progress is made."""
        self._files, self.timeout_s, self._is_total, self._clock = list(files), timeout_s, is_total, clock
        self._marks = [(0, "")] * len(self._files)
        self._moved = [clock()] * len(self._files)

    def is_over(self) -> bool:
        """No rank has moved for timeout_s."""
        now = self._clock()
        for index, path in enumerate(self._files):
            mark = progress.read(path)
            if mark != self._marks[index]:
                self._marks[index] = mark
                if not self._is_total:
                    self._moved[index] = now
        return now - max(self._moved) >= self.timeout_s

    def report(self) -> str:
        """Where each rank stands; one that hangs is behind the others, which wait for it."""
        least = min(number for number, _ in self._marks)
        parts = []
        for rank, (number, text) in enumerate(self._marks):
            is_behind = number == least and any(other > least for other, _ in self._marks)
            parts.append(f"rank {rank} at {text or 'its start'!r}" + (" (behind)" if is_behind else ""))
        return ", ".join(parts)


def progress_file(log_path: Path) -> Path:
    """Where the rank that logs to `log_path` leaves its marks."""
    return log_path.with_suffix(".progress")
