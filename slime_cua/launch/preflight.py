"""What is looked at before a run starts anything: the first fault is a sentence that names the key and what to do."""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from sandbox_cluster.tasks.loader import load_tasks
from slime_cua.config.run import RunConfig
from slime_cua.convert.hf_folder import tensor_table
from slime_cua.core.errors import ConfigError, InfrastructureError, PreflightError
from slime_cua.core.types import Task
from slime_cua.trainer.layouts import check_divisibility

MODEL_FILES = ("config.json", "tokenizer.json", "preprocessor_config.json")
BASE_BYTES = 256 << 20
"""Screenshots, episodes and logs of a small run."""
LEAST_BYTES = 4 << 20
"""Less than that is a full disk."""
BYTES_PER_PARAMETER = 52
"""Three checkpoints (weights, master weights, two moments: 12 to 16 bytes each) and an export or two."""


@dataclass(frozen=True)
class RunTasks:
    """The tasks of a run."""

    train: list[Task]
    demonstrations: list[Task]
    """Those of `train` where the config names no others."""
    heldout: list[Task]


def check_inputs(config: RunConfig) -> RunTasks:
    """The tasks of a run whose model and tasks are there. Raises ConfigError or TaskError.

    Looks at files only: nothing is started, written or imported that takes long.
    """
    check_model(config)
    train, shown, heldout = (
        load_tasks(paths) if paths else []
        for paths in (config.tasks.train, config.tasks.demonstrations, config.tasks.heldout)
    )
    if not train and (config.num_steps or (config.sft.num_episodes and not shown)):
        raise ConfigError("tasks.train names no task: give folders or files of task JSON")
    for name, tasks in (("train", train), ("demonstrations", shown)):
        both = {task.id for task in tasks} & {task.id for task in heldout}
        if both:
            raise ConfigError(
                f"{len(both)} task(s) are in tasks.{name} and in tasks.heldout, for example {min(both)}: "
                "held-out scores would mean nothing"
            )
    return RunTasks(train, shown or train, heldout)


def check_arms(config: RunConfig) -> None:
    """ConfigError when arms are to be scored and no file names held-out tasks."""
    if config.evaluation.arms and not config.tasks.heldout:
        raise ConfigError(
            f"evaluation.arms = [{', '.join(config.evaluation.arms)}] and tasks.heldout is empty: give folders or files of "
            "task JSON to score them on, or evaluation.arms=[]"
        )


def check_model(config: RunConfig) -> None:
    """ConfigError unless `model` is a whole Hugging Face folder that the trainer's layout fits."""
    folder = Path(config.model)
    if not config.model or not folder.is_dir():
        raise ConfigError(
            f"model = {config.model!r}: there is no such folder; give a Hugging Face checkpoint"
        )
    missing = [name for name in MODEL_FILES if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors (the weights)")
    if missing:
        raise ConfigError(
            f"model = {config.model!r}: no Hugging Face checkpoint is there, {', '.join(missing)} missing"
        )
    tensor_table(folder)  # a truncated or missing shard is named before anything starts
    check_divisibility(folder, config.trainer.parallel)


def check_gateway(url: str, timeout_s: float) -> None:
    """PreflightError when the gateway does not answer, or no desktop host has registered with it, for timeout_s."""
    import httpx

    end = time.monotonic() + timeout_s
    while True:
        try:
            reply = httpx.get(f"{url.rstrip('/')}/healthz", timeout=5.0, trust_env=False)
            if reply.status_code == 200 and reply.json()["num_hosts"] > 0:
                return
            fault = "has no desktop host: start one (slime-cua sandbox host), or wait until it has registered"
        except (httpx.HTTPError, ValueError, KeyError) as error:
            fault = f"does not answer as a gateway ({type(error).__name__}: {error})"
        if time.monotonic() >= end:
            raise PreflightError(f"sandbox.gateway_url = {url} {fault}")
        time.sleep(1.0)


def check_disk(run_dir: Path, model: Path) -> None:
    """PreflightError when `run_dir`'s disk has less room than checkpoints and exports of `model` take."""
    needed = BASE_BYTES + BYTES_PER_PARAMETER * num_parameters(model)
    free = shutil.disk_usage(run_dir).free
    if free < needed:
        raise PreflightError(
            f"{run_dir} has {free >> 20} MiB free, this run needs about {needed >> 20}: free some, or set run_dir"
        )


def check_room(run_dir: Path, least_bytes: int = LEAST_BYTES) -> None:
    """InfrastructureError when the disk of a run that is at work has less than `least_bytes` free.

    Looked at while it runs: what writes there (gateway, store, screenshots) would fail one retry after the other, and a host
    that keeps its state there would boot no desktop while everybody waits for one.
    """
    free = shutil.disk_usage(run_dir).free
    if free < least_bytes:
        raise InfrastructureError(
            f"no space is left on the disk of {run_dir} ({free >> 20} MiB free, {least_bytes >> 20} needed to go on): free some, "
            "then the same command continues the run"
        )


def host_complaints(url: str, token: str) -> str:
    """Why hosts with a free slot have no desktop ready, as they last said; empty when there is none, or nobody answers at once."""
    import httpx

    try:
        reply = httpx.get(
            f"{url.rstrip('/')}/v1/hosts",
            headers={"Authorization": f"Bearer {token}"},
            timeout=2.0,
            trust_env=False,
        )
        hosts = reply.raise_for_status().json()
        short = [host for host in hosts if not host["num_ready"] and host["num_leased"] < host["num_slots"]]
        return "; ".join(f"{host['host_id']}: {host['last_error']}" for host in short if host["last_error"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return ""


def num_parameters(model: Path) -> int:
    """Parameters in the safetensors files of a folder, by their headers. Raises ConfigError for a broken file."""
    return sum(prod(shape) for path in sorted(model.glob("*.safetensors")) for shape in _shapes(path))


def _shapes(path: Path) -> Iterator[list[int]]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{path} is no whole safetensors file: {error}") from None
    yield from (entry["shape"] for name, entry in header.items() if name != "__metadata__")
