"""Ray: started for the run on one machine, or joined where a cluster is up. Only named variables travel to workers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_cua.core.errors import PreflightError

FORWARDED = re.compile(
    r"^(NCCL_|GLOO_|SLIME_CUA_|TORCH_|NVSHMEM_|HF_HUB_OFFLINE$|OMP_NUM_THREADS$|CUDA_DEVICE_)"
)
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)
OBJECT_STORE_BYTES = 256 << 20


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that workers need: an allow-list, never the whole environment, never a secret.

    Secrets (a W&B key, say) are used by the driver alone; Ray would store them in the job's metadata in clear.
    """
    return {k: v for k, v in environment.items() if FORWARDED.match(k) and not SECRET.search(k)}


@contextmanager
def ray_runtime(*, num_gpus_needed: int, log_dir: Path) -> Iterator[None]:
    """Ray for the length of the block. RAY_ADDRESS joins a running cluster; otherwise one starts on this machine.

    Raises PreflightError when the cluster has fewer GPUs than the run needs.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    root = str(Path(__file__).resolve().parents[2])
    python_path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {
        **forwarded_environment(os.environ),
        "PYTHONPATH": python_path,
        "TOKENIZERS_PARALLELISM": "false",
    }
    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {} if address else {"num_cpus": 64, "object_store_memory": OBJECT_STORE_BYTES}
    ray.init(
        address=address,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": variables},
        **local,
    )
    try:
        have = int(ray.cluster_resources().get("GPU", 0))
        if have < num_gpus_needed:
            raise PreflightError(
                f"the run needs {num_gpus_needed} GPUs and the Ray cluster has {have}: add nodes, or lower "
                f"trainer.parallel and rollout.engine.num_engines"
            )
        (log_dir / "ray_job").write_text(ray.get_runtime_context().get_job_id())
        yield
    finally:
        ray.shutdown()
