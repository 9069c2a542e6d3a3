"""The ways of `rollout.publish.way`, by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime_cua.config.rollout import PublishConfig
from slime_cua.core.errors import ConfigError

if TYPE_CHECKING:
    from slime_cua.trainer.publisher import WeightPublisher


@dataclass(frozen=True)
class PublishPlan:
    """What a publisher is made from; the same for a whole run."""

    config: PublishConfig
    use_gpu: bool
    engine_tp: int
    folder: Path
    """Where versions are written, for the way `disk`."""

    @property
    def gpu_share(self) -> float:
        """Of a GPU, for the trainer's rank and for each rank of an engine."""
        return 0.5 if self.config.way == "ipc" else 1.0


def make_publisher(plan: PublishPlan, address: str, timeout_s: float) -> WeightPublisher:
    """The publisher of trainer rank 0. address: where engines reach this rank. Raises ConfigError for what cannot work here."""
    return WAYS[plan.config.way](plan, address, timeout_s)


def _broadcast(plan: PublishPlan, address: str, timeout_s: float) -> WeightPublisher:
    from slime_cua.trainer.publisher import BroadcastPublisher

    return BroadcastPublisher(
        backend="nccl" if plan.use_gpu else "gloo",
        device="cuda" if plan.use_gpu else "cpu",
        address=address,
        bucket_bytes=plan.config.bucket_mb << 20,
        engine_tp=plan.engine_tp,
        timeout_s=timeout_s,
    )


def _ipc(plan: PublishPlan, address: str, timeout_s: float) -> WeightPublisher:
    from slime_cua.trainer.publisher import IpcPublisher

    if not plan.use_gpu:
        raise ConfigError(
            "rollout.publish.way = ipc needs a GPU that trainer and engine share: use broadcast or disk"
        )
    if "expandable_segments:true" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "").lower():
        raise ConfigError(
            "rollout.publish.way = ipc: memory of expandable segments cannot be mapped by another process; take "
            "expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF"
        )
    return IpcPublisher(
        bucket_bytes=plan.config.bucket_mb << 20, engine_tp=plan.engine_tp, timeout_s=timeout_s
    )


def _disk(plan: PublishPlan, address: str, timeout_s: float) -> WeightPublisher:
    from slime_cua.trainer.publisher import DiskPublisher

    return DiskPublisher(plan.folder, keep=plan.config.num_kept, timeout_s=timeout_s)


WAYS: dict[str, Callable[[PublishPlan, str, float], WeightPublisher]] = {
    "broadcast": _broadcast,
    "ipc": _ipc,
    "disk": _disk,
}
