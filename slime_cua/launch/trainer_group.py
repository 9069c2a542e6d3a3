"""The trainer's ranks as Ray actors: one a GPU, or one a process on CPU. Every call goes to all ranks at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_cua.config.trainer import TrainerConfig
from slime_cua.core.errors import EngineError, InfrastructureError, SlimeCuaError
from slime_cua.core.ports import free_port
from slime_cua.launch.ray_runtime import explain_loss

if TYPE_CHECKING:
    from slime_cua.trainer.publisher import PublishReport


DEATH_NEWS_S = 5.0
"""Ray needs a moment to see that a process is gone."""


class TrainerActor:
    """Wraps a TrainerRank; built inside the actor, so that the driver never imports megatron."""

    def __init__(self, config: dict[str, Any], rank: int, log_path: str) -> None:
        with Path(log_path).open("ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        self._config = TrainerConfig.model_validate(config)
        self._rank = rank
        self._trainer: Any = None
        self._publisher: Any = None
        self._address = "127.0.0.1"

    def address(self) -> tuple[str, int]:
        """(host, free port) of this rank, for the rendezvous."""
        import ray

        return ray.util.get_node_ip_address(), free_port("")

    def initialise(self, world_size: int, address: tuple[str, int]) -> None:
        self._address = address[0]
        from slime_cua.trainer.rank import TrainerRank

        self._trainer = TrainerRank(
            self._config,
            rank=self._rank,
            world_size=world_size,
            master_addr=address[0],
            master_port=address[1],
        )

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._trainer, method)(*args, **kwargs)

    def publish(self, version: int, urls: list[str], use_gpu: bool, engine_tp: int) -> Any:
        """Weights to the engines; every rank takes part in gathering them, rank 0 sends."""
        tensors = self._trainer.named_hf_tensors()
        if self._rank != 0:
            for _ in tensors:
                pass
            return None
        if self._publisher is None:
            from slime_cua.trainer.publisher import BroadcastPublisher

            self._publisher = BroadcastPublisher(
                backend="nccl" if use_gpu else "gloo",
                device="cuda" if use_gpu else "cpu",
                address=self._address,
                engine_tp=engine_tp,
                timeout_s=self._config.timeout_s,
            )
        return self._publisher.publish(tensors, version, urls)


class RayTrainerGroup:
    """All ranks of one trainer. `call` returns rank 0's result; a lost rank or a passed deadline is an error."""

    def __init__(self, config: TrainerConfig, *, use_gpu: bool, log_dir: Path) -> None:
        import ray

        self._config, self._log_dir = config, log_dir
        self.world_size = config.parallel.world_size
        actor: Any = ray.remote(num_cpus=0, num_gpus=1 if use_gpu else 0, max_restarts=0)(TrainerActor)
        self._ranks: list[Any] = [
            actor.remote(config.model_dump(mode="json"), rank, str(log_dir / f"trainer_{rank}.log"))
            for rank in range(self.world_size)
        ]
        try:
            address = self._get([self._ranks[0].address.remote()])[0]
            self._get([rank.initialise.remote(self.world_size, address) for rank in self._ranks])
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run `method` on every rank with the same arguments; rank 0's result."""
        return self._get([rank.call.remote(method, *args, **kwargs) for rank in self._ranks])[0]

    def publish(self, version: int, urls: Sequence[str], *, use_gpu: bool, engine_tp: int) -> PublishReport:
        """The current weights to `urls` as `version`; what each engine said. Raises EngineError when none took them."""
        calls = [rank.publish.remote(version, list(urls), use_gpu, engine_tp) for rank in self._ranks]
        report: PublishReport = self._get(calls)[0]
        if not report.engines:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in report.failures.items())
            raise EngineError(f"no engine took version {version}: {reasons}")
        return report

    def close(self) -> None:
        import ray

        for rank in self._ranks:
            ray.kill(rank)

    def _get(self, refs: list[Any]) -> list[Any]:
        import ray

        try:
            return list(ray.get(refs, timeout=self._config.timeout_s))
        except ray.exceptions.GetTimeoutError as error:
            raise InfrastructureError(
                f"the trainer did not answer within trainer.timeout_s = {self._config.timeout_s}: see {self._log_dir}/trainer_*.log"
            ) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SlimeCuaError):
                raise error.cause from None
            self._check_alive(refs)
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

    def _loss(self, error: BaseException) -> InfrastructureError:
        return explain_loss("a trainer rank", f"{self._log_dir}/trainer_*.log", error)
