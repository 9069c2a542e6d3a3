"""The trainer's ranks as Ray actors: one a GPU, or one a process on CPU. Every call goes to all ranks at once."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from slime_cua.config.trainer import TrainerConfig
from slime_cua.core.errors import InfrastructureError, SlimeCuaError


class TrainerActor:
    """Wraps a TrainerRank; built inside the actor, so that the driver never imports megatron."""

    def __init__(self, config: dict[str, Any], rank: int, log_path: str) -> None:
        import os

        with Path(log_path).open("ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        self._config = TrainerConfig.model_validate(config)
        self._rank = rank
        self._trainer: Any = None

    def address(self) -> tuple[str, int]:
        """(host, free port) of this rank, for the rendezvous."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def initialise(self, world_size: int, address: tuple[str, int]) -> None:
        from slime_cua.trainer.rank import TrainerRank

        self._trainer = TrainerRank(
            self._config, rank=self._rank, world_size=world_size, master_addr=address[0], master_port=address[1]
        )

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._trainer, method)(*args, **kwargs)


class RayTrainerGroup:
    """All ranks of one trainer. `call` returns rank 0's result; a lost rank or a passed deadline is an error."""

    def __init__(self, config: TrainerConfig, *, use_gpu: bool, log_dir: Path) -> None:
        import ray

        self._config = config
        self.world_size = config.parallel.world_size
        actor = ray.remote(num_cpus=0, num_gpus=1 if use_gpu else 0, max_restarts=0)(TrainerActor)
        self._ranks = [
            actor.remote(config.model_dump(mode="json"), rank, str(log_dir / f"trainer_{rank}.log"))
            for rank in range(self.world_size)
        ]
        address = self._get(self._ranks[0].address.remote())
        self._get([rank.initialise.remote(self.world_size, address) for rank in self._ranks])

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run `method` on every rank with the same arguments; rank 0's result."""
        return self._get([rank.call.remote(method, *args, **kwargs) for rank in self._ranks])[0]

    def close(self) -> None:
        import ray

        for rank in self._ranks:
            ray.kill(rank)

    def _get(self, refs: Any) -> Any:
        import ray

        try:
            return ray.get(refs, timeout=self._config.timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise InfrastructureError(
                f"the trainer did not answer within trainer.timeout_s = {self._config.timeout_s}: see logs/trainer_*.log"
            ) from error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, SlimeCuaError) else error) from None
        except ray.exceptions.RayActorError as error:
            raise InfrastructureError(f"a trainer rank died: see logs/trainer_*.log ({error})") from error
