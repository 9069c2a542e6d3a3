"""Engines of a run: each server owned by a Ray actor on the node where it runs, all watched by one fleet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.engines.fleet import EngineFleet, EngineHandle
from rollout.engines.process import EngineProcess
from slime_cua.config.rollout import EngineConfig
from slime_cua.core.errors import EngineError


class EngineActor:
    """Owns one EngineProcess; the server ends with this actor."""

    def __init__(self, config: dict[str, Any], model: str, log_path: str, version: int, device: str) -> None:
        self._process = EngineProcess(
            EngineConfig.model_validate(config), Path(model), Path(log_path), version=version, device=device
        )

    def start(self) -> str:
        return self._process.start()

    def stop(self) -> None:
        self._process.stop()

    def is_running(self) -> bool:
        return self._process.is_running

    def pid(self) -> int:
        return self._process.pid


class RayEngine:
    """`EngineHandle` of a server on some node of the Ray cluster."""

    def __init__(self, config: EngineConfig, model: Path, log_path: Path, *, num_gpus: float) -> None:
        self._arguments = (config.model_dump(mode="json"), str(model), str(log_path), 0)
        self._device = "cuda" if num_gpus else "cpu"
        self._num_gpus = num_gpus
        self._timeout_s = config.start_timeout_s + 30.0
        self._actor: Any = None
        self.url = ""

    def start(self) -> str:
        import ray

        remote: Any = ray.remote(num_cpus=0, num_gpus=self._num_gpus, max_restarts=0)(EngineActor)
        self._actor = remote.remote(*self._arguments, self._device)
        try:
            self.url = ray.get(self._actor.start.remote(), timeout=self._timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, EngineError) else error) from None
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise EngineError(f"the engine's actor is gone: {error}") from error
        return self.url

    def restart(self) -> str:
        self.stop()
        return self.start()

    def stop(self) -> None:
        import ray

        actor, self._actor = self._actor, None
        if actor is None:
            return
        with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            ray.get(actor.stop.remote(), timeout=30.0)
        ray.kill(actor)

    @property
    def pid(self) -> int:
        import ray

        return int(ray.get(self._actor.pid.remote(), timeout=10.0)) if self._actor is not None else 0

    @property
    def is_running(self) -> bool:
        import ray

        if self._actor is None:
            return False
        try:
            return bool(ray.get(self._actor.is_running.remote(), timeout=10.0))
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return False


class ExternalEngine:
    """`EngineHandle` of a server that somebody else runs: never started or ended by us."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def start(self) -> str:
        return self.url

    def restart(self) -> str:
        return self.url

    def stop(self) -> None:
        return

    @property
    def pid(self) -> int:
        return 0

    @property
    def is_running(self) -> bool:
        return True


def make_fleet(
    config: EngineConfig,
    model: Path,
    log_dir: Path,
    *,
    gpu_share: float,
    on_change: Callable[[tuple[str, ...], int], None] | None = None,
) -> EngineFleet:
    """The fleet that the config asks for, not started yet; every server starts with `model` as version 0.

    gpu_share: GPUs for each rank of an engine, below 1 where it shares one with the trainer; 0 on CPU.
    on_change: hears, from the fleet's thread, of URLs in traffic and their version whenever these change.
    """
    handles: list[EngineHandle]
    if config.kind == "external":
        handles = [ExternalEngine(url) for url in config.urls]
    else:
        handles = [
            RayEngine(config, model, log_dir / f"engine_{index}.log", num_gpus=config.tp * gpu_share)
            for index in range(config.num_engines)
        ]
    return EngineFleet(handles, update_timeout_s=config.request_timeout_s, on_change=on_change)
