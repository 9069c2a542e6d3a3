"""One logger for a run: JSON lines always, W&B beside it. One point a step and axis, also after a resume."""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_cua.core.files import write_atomic
from slime_cua.observability.metrics import Axis, find


class MetricsLogger:
    """Writes RUN/metrics.jsonl ({"axis", "step", "time_s", "values"}) and a W&B run (offline by default).

    Resume policy: rows beyond `resume_step` of the axis "step", and beyond `resume_steps` of any axis, were logged by
    steps that are done again; they are removed from the file, so that each step has one row, the new one. The W&B run keeps its id (RUN/wandb_id) and uses its own
    axis metric, never the library's counter, so that later values at the same step replace the older ones in plots.

    Raises ValueError for a name that metrics.METRICS does not list.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        project: str = "slime_cua",
        wandb_mode: str = "offline",
        config: dict[str, Any] | None = None,
        resume_step: int | None = None,
        resume_steps: Mapping[Axis, int] | None = None,
    ) -> None:
        self.path = run_dir / "metrics.jsonl"
        run_dir.mkdir(parents=True, exist_ok=True)
        done: dict[Axis, int] = {} if resume_step is None else {"step": resume_step}
        for axis, step in {**done, **(resume_steps or {})}.items():
            self._forget_after(axis, step)
        self._file = self.path.open("a", buffering=1)
        self._wandb = _start_wandb(run_dir, project, wandb_mode, config or {})

    def log(self, values: dict[str, float], *, step: int, axis: Axis = "step") -> None:
        """One row. NaN and infinity are kept as strings in the file: they must be seen."""
        for name in values:
            row = find(name)
            if row is None or row.axis != axis:
                raise ValueError(
                    f"metric {name!r} is not in observability.metrics.METRICS for axis {axis}: add it"
                )
        clean = {k: float(v) if math.isfinite(v) else str(float(v)) for k, v in values.items()}
        self._file.write(
            json.dumps({"axis": axis, "step": step, "time_s": round(time.time(), 3), "values": clean}) + "\n"
        )
        if self._wandb is not None:
            self._wandb.log({**values, f"axis/{axis}": step})

    def close(self) -> None:
        self._file.close()
        if self._wandb is not None:
            import wandb

            self._wandb.finish()
            wandb.teardown()

    def _forget_after(self, axis: str, step: int) -> None:
        rows = [row for row in read_rows(self.path) if row["axis"] != axis or row["step"] <= step]
        if self.path.exists():
            write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl; a last line cut by a crash is left out. Empty when the file is missing."""
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def last_step(run_dir: Path) -> int:
    """The last step of the axis "step" in RUN/metrics.jsonl; 0 when there is none."""
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["axis"] == "step"]
    return max((int(row["step"]) for row in rows), default=0)


def _start_wandb(run_dir: Path, project: str, mode: str, config: dict[str, Any]) -> Any:
    if mode == "disabled":
        return None
    import wandb

    id_file = run_dir / "wandb_id"
    if not id_file.exists():
        write_atomic(id_file, secrets.token_hex(4).encode())
    os.environ.setdefault("WANDB_SILENT", "true")
    run = wandb.init(
        project=project,
        id=id_file.read_text(),
        name=run_dir.name,
        dir=str(run_dir),
        mode=mode,  # type: ignore[arg-type]
        config=config,
        resume="allow" if mode == "online" else None,
        settings=wandb.Settings(console="off", x_disable_stats=True, quiet=True),
    )
    for axis in ("step", "sft_step", "eval"):
        run.define_metric(f"axis/{axis}", hidden=True)
    for prefix, axis in (("sft/*", "sft_step"), ("eval/*", "eval"), ("*", "step")):
        run.define_metric(prefix, step_metric=f"axis/{axis}")
    return run
