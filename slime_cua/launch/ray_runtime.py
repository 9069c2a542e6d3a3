"""Ray: started for the run on one machine, or joined where a cluster is up. Only named variables travel to workers.

A Ray that we start keeps its sockets and logs in a folder of its own (its path must be short: they are Unix sockets), which
goes when the run ends. A killed run leaves that folder; the next start on the machine removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_cua.core.errors import InfrastructureError, PreflightError
from slime_cua.launch.signals import kept_handlers

FORWARDED = re.compile(
    r"^(NCCL_|GLOO_|SLIME_CUA_|TORCH_|NVSHMEM_|HF_HUB_OFFLINE$|OMP_NUM_THREADS$|CUDA_DEVICE_)"
)
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)
OBJECT_STORE_BYTES = 256 << 20
FOLDER_PREFIX = "slime_cua_ray_"
FOLDER_PARENT = Path("/tmp")
NUM_STARTS = 5
KILL_S = 2.0
"""An actor that Ray was told to end has so long."""


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that workers need: an allow-list, never the whole environment, never a secret.

    Secrets (a W&B key, say) are used by the driver alone; Ray would store them in the job's metadata in clear.
    """
    return {k: v for k, v in environment.items() if FORWARDED.match(k) and not SECRET.search(k)}


@contextmanager
def ray_runtime(
    *, num_gpus_needed: int, log_dir: Path, on_folder: Callable[[Path], None] | None = None
) -> Iterator[None]:
    """Ray for the length of the block. RAY_ADDRESS joins a running cluster; otherwise one starts on this machine.

    on_folder: hears of the folder that a Ray of our own works in, before it is used.
    Raises PreflightError when the cluster has fewer GPUs than the run needs or cannot be joined.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # 15 by default: on CPU the trainer would starve beside engines
    os.environ.setdefault(
        "SPT_NOENV", "1"
    )  # a process that sets its title keeps its environment readable: launch.guardian
    import ray

    address = os.environ.get("RAY_ADDRESS")
    with contextlib.ExitStack() as stack:
        if address:
            options: dict[str, Any] = {"runtime_env": {"env_vars": _worker_environment()}}
        else:
            folder = stack.enter_context(temporary_folder())
            if on_folder is not None:
                on_folder(folder)
            stack.enter_context(_environment(_worker_environment()))
            options = {"num_cpus": 64, "object_store_memory": OBJECT_STORE_BYTES, "_temp_dir": str(folder)}
        stack.callback(ray.shutdown)
        try:
            with kept_handlers():
                _init_ray(address, options)
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            where = (
                f"the Ray cluster RAY_ADDRESS={address} cannot be joined" if address else "Ray did not start"
            )
            raise PreflightError(f"{where}: {first_line(error)}") from error
        have = int(ray.cluster_resources().get("GPU", 0))
        if have < num_gpus_needed:
            raise PreflightError(
                f"the run needs {num_gpus_needed} GPUs and the Ray cluster has {have}: add nodes, or lower "
                f"trainer.parallel and rollout.engine.num_engines"
            )
        session = "" if address else options["_temp_dir"]
        (log_dir / "ray_job").write_text(f"{ray.get_runtime_context().get_job_id()} {session}\n")
        yield


def _init_ray(address: str | None, options: Mapping[str, Any]) -> None:
    """ray.init. A Ray of our own is tried NUM_STARTS times: its node has 30 s to start, which a busy machine exceeds.

    Raises TimeoutError when it never came up, and what ray.init raises otherwise.
    """
    import ray

    for number in range(1, NUM_STARTS + 1):
        try:
            ray.init(
                address=address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
            return
        except Exception as error:  # Ray raises a plain Exception here
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if address or number == NUM_STARTS:
                raise TimeoutError(
                    f"its node was not up within 30 s, {number} times: the machine is too busy"
                ) from error


@contextmanager
def temporary_folder(parent: Path = FOLDER_PARENT) -> Iterator[Path]:
    """A folder for one local Ray, held by a lock, removed at the end; folders of killed runs are removed first."""
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path = FOLDER_PARENT) -> int:
    """Remove folders of Rays whose driver is gone: nobody holds their lock. Gives how many; others' are left alone."""
    num_removed = 0
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                num_removed += 1
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
    return num_removed


def explain_loss(who: str, logs: str, error: BaseException) -> InfrastructureError:
    """What a dead actor means for a person: a sentence, the likely cause, where to look."""
    import ray

    if isinstance(error, ray.exceptions.OutOfMemoryError) or "memory" in first_line(error).lower():
        return InfrastructureError(
            f"{who} was ended because the machine's memory is full: use fewer or smaller parts "
            f"(sandbox.num_desktops, trainer.max_tokens_per_rank, rollout.engine.max_batch); logs: {logs}"
        )
    return InfrastructureError(
        f"{who} died (killed, crashed, or out of memory): see {logs} and the kernel's log (dmesg); the same command "
        f"continues the run"
    )


def end_actor(actor: Any, pid: int) -> None:
    """End an actor's process. Ray asks it; one of this machine that is stopped or hangs is killed, too.

    pid: of the process, from the actor itself; 0: not known.
    """
    import ray

    ray.kill(actor)
    end = time.monotonic() + KILL_S
    while pid and time.monotonic() < end and is_actor(pid):
        time.sleep(0.05)
    if pid and is_actor(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def is_actor(pid: int) -> bool:
    """Whether `pid` is a Ray worker of this machine, so that a number of another machine hits nobody."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something; its type when there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A Ray of our own inherits them from us: no agent has to set them up for each worker, which takes seconds."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _worker_environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {
        **forwarded_environment(os.environ),
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TOKENIZERS_PARALLELISM": "false",
    }
