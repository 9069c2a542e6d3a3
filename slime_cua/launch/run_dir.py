"""The run directory: the one place of truth of a run.

config.yaml        resolved config               metrics.jsonl   wandb/   report.html   report_data.json
phases.json        phases that are done, with their results
images/            content-addressed screenshots
episodes/NAME.jsonl  groups of a phase, one a line
checkpoints/step_000010/{trainer/..., run_state.json}   complete when listed in checkpoints/latest
hf/NAME/           Hugging Face checkpoints (sft, rl, ...)
logs/              one file a process
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from slime_cua.config.base import load, save_resolved
from slime_cua.config.run import RunConfig
from slime_cua.core.errors import ConfigError, PreflightError
from slime_cua.core.files import write_atomic

MAY_CHANGE = ("num_steps", "minutes", "save_every", "log", "run_dir", "pool")
"""Top-level keys that may differ between a run and its continuation."""
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

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint; half-written ones are never listed."""
        mark = self.checkpoints / "latest"
        return self.checkpoints / mark.read_text().strip() if mark.exists() else None

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def publish_checkpoint(self, step: int, run_state: dict[str, Any], *, keep: int = 2) -> None:
        """List the checkpoint as complete once its run state is in it; then delete older ones."""
        folder = self.checkpoint(step)
        write_atomic(folder / "run_state.json", json.dumps(run_state).encode())
        write_atomic(self.checkpoints / "latest", folder.name.encode())
        older = sorted(path for path in self.checkpoints.glob("step_*") if path.name < folder.name)
        for path in older[: max(0, len(older) - keep + 1)]:
            shutil.rmtree(path, ignore_errors=True)

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
            old = load(RunConfig, path).model_dump(mode="json")
            new = self.config.model_dump(mode="json")
            changed = [
                f"{key}: {old[key]!r} -> {new[key]!r}"
                for key in new
                if key not in MAY_CHANGE and old[key] != new[key]
            ]
            if changed:
                raise ConfigError(
                    f"{self.path} was started with another config; start a new run_dir or undo:\n  "
                    + "\n  ".join(changed)
                )
        save_resolved(self.config, path)
