"""The run directory: the one place of truth of a run.

config.yaml        resolved config               metrics.jsonl   wandb/   report.html   report_data.json
phases.json        phases that are done, with their results
state.json         the run state of RL: the one commit point of a step (launch.run_state)
images/            content-addressed screenshots
episodes/NAME.jsonl  groups of a phase, one a line; rl_open/ has the finished episodes of RL groups that are not finished
checkpoints/step_00000010/   weights, optimiser, RNG; they count when state.json names them. sft/ has those of the cold start
hf/NAME/           Hugging Face checkpoints (sft, rl, ...)
logs/              one file a process; faults.jsonl
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_cua.config.base import load, save_resolved
from slime_cua.config.run import RunConfig
from slime_cua.core.errors import ConfigError, PreflightError
from slime_cua.core.files import write_atomic
from slime_cua.launch.run_state import SFT_FILE
from slime_cua.trainer.folders import (
    is_whole,
    removable_steps,
    remove,
    remove_leftovers,
    step_folder,
)

MAY_CHANGE = (
    "num_steps",
    "minutes",
    "save_every",
    "run_dir",
    "log",
    "faults",
    "pool",
    "sft.save_every",
    "sandbox.gateway_url",
    "sandbox.num_desktops",
    "sandbox.num_spares",
    "sandbox.max_boots",
    "sandbox.acquire_timeout_s",
    "rollout.engine.urls",
    "rollout.engine.num_engines",
    "rollout.engine.tp",
    "rollout.engine.python",
    "rollout.engine.extra_args",
    "rollout.engine.max_batch",
    "rollout.engine.num_threads",
    "rollout.engine.start_timeout_s",
    "rollout.engine.request_timeout_s",
    "rollout.call_timeout_s",
    "rollout.max_image_bytes",
    "trainer.timeout_s",
    "trainer.restart_timeout_s",
    "trainer.num_threads",
    "trainer.vision_cache_mb",
    "trainer.async_save",
)
"""Keys, or whole sections, that may differ between a run and its continuation: how much machine it has, how long it lasts,
how long it waits. Not what is learned from what."""
MIN_FREE_BYTES = 256 << 20
"""Below that nothing starts; what a model's checkpoints take is looked at by launch.preflight."""


class RunDir:
    """Paths, lock and phase marks of one run. Use as a context manager: it holds the lock."""

    def __init__(self, config: RunConfig) -> None:
        self.path = Path(config.run_dir)
        self.config = config
        self.images = self.path / "images"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self._lock: int | None = None

    def __enter__(self) -> RunDir:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PreflightError(f"run_dir {self.path} cannot be written: {error}") from error
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise PreflightError(
                f"another run is at work in {self.path}: wait, end it, or set run_dir"
            ) from None
        try:
            self._check_disk()
            self._check_config()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def episodes(self, name: str) -> Path:
        return self.path / "episodes" / f"{name}.jsonl"

    def hf(self, name: str) -> Path:
        return self.path / "hf" / name

    def phase_result(self, name: str) -> dict[str, Any] | None:
        """What the finished phase `name` left, or None when it is not finished."""
        result: dict[str, Any] | None = self._phases().get(name)
        return result

    def finish_phase(self, name: str, result: dict[str, Any]) -> None:
        write_atomic(
            self.path / "phases.json", json.dumps({**self._phases(), name: result}, indent=1).encode()
        )

    def checkpoint(self, step: int) -> Path:
        """Where the RL checkpoint of `step` is."""
        return step_folder(self.checkpoints, step)

    def is_whole(self, step: int) -> bool:
        """Whether the checkpoint of `step` is there with every file in its length."""
        return is_whole(self.checkpoint(step))

    def remove_checkpoints(self, *, but: Sequence[int], folder: Path | None = None) -> None:
        """Remove RL checkpoints (or those in `folder`) that the run state does not name, and what interrupted saves left.

        The one with the best score stays, and so do those that somebody reads.
        """
        folder = folder or self.checkpoints
        remove_leftovers(folder)
        for step in removable_steps(folder, but=but):
            remove(step_folder(folder, step))

    def remove_sft_checkpoints(self) -> None:
        """The cold start is exported: it needs its checkpoints no more."""
        (self.path / SFT_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.checkpoints / "sft", ignore_errors=True)

    def reopen_phase(self, name: str, label: str) -> None:
        """The phase goes on, so what was scored after it is out of date: its mark goes, its episodes stay as `label`."""
        phases = {key: value for key, value in self._phases().items() if key not in (name, f"eval_{name}")}
        scored = self.episodes(f"eval_{name}")
        if scored.exists():
            scored.rename(self.episodes(f"eval_{name}_{label}"))
        write_atomic(self.path / "phases.json", json.dumps(phases, indent=1).encode())

    def _phases(self) -> dict[str, Any]:
        path = self.path / "phases.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self.path).free
        if free < MIN_FREE_BYTES:
            raise PreflightError(
                f"{self.path} has {free >> 20} MiB free, a run needs {MIN_FREE_BYTES >> 20}: free some, or set run_dir"
            )

    def _check_config(self) -> None:
        path = self.path / "config.yaml"
        if path.exists():
            old = _leaves(load(RunConfig, path).model_dump(mode="json"))
            new = _leaves(self.config.model_dump(mode="json"))
            changed = [
                f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
                for key in sorted(old.keys() | new.keys())
                if old.get(key) != new.get(key) and not _may_change(key)
            ]
            if changed:
                raise ConfigError(
                    f"{self.path} was started with another config; start a new run_dir or undo:\n  "
                    + "\n  ".join(changed)
                    + f"\n(a run may go on with other values of: {', '.join(MAY_CHANGE)})"
                )
        save_resolved(self.config, path)


def _leaves(plain: Any, prefix: str = "") -> dict[str, Any]:
    """{"a.b": value} of nested mappings; an empty mapping is a value."""
    if not isinstance(plain, dict) or not plain:
        return {prefix: plain}
    return {
        key: value
        for name, inner in plain.items()
        for key, value in _leaves(inner, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def _may_change(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)
