"""The run state: everything that decides the future of a phase, in one file, replaced as a whole.

RUN/state.json (RL, at each step) and RUN/sft_state.json (cold start, at each checkpoint) are the commit points. What they
name is on disk before they are written; what they do not name does not exist for a resume. docs/resume.md says more.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime_cua.core.errors import CheckpointError
from slime_cua.core.files import write_atomic

FORMAT = 1
FILE = "state.json"
SFT_FILE = "sft_state.json"


@dataclass(frozen=True)
class Batch:
    """What one optimiser step trained."""

    groups: dict[str, int]
    """Group id -> byte at which its line begins in episodes/rl.jsonl, in the order of training."""
    num_stored: int
    """Groups that had been stored when the step was committed: with the order in the store, the whole history."""


@dataclass
class RunState:
    """State after `version` optimiser steps."""

    version: int = 0
    rollout: dict[str, Any] | None = None
    """Sampler, scheduler and store positions: RolloutWorker.state_dict."""
    batches: list[Batch] = field(default_factory=list)
    """One a step, since the beginning: what no checkpoint holds is trained again from them."""
    checkpoints: list[int] = field(default_factory=list)
    """Steps of the checkpoints that count, oldest first."""
    spent_s: float = 0.0
    """Time that the RL phase took so far."""
    row: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step, for a run that dies before it logs them."""

    def __post_init__(self) -> None:
        if len(self.batches) != self.version:
            raise CheckpointError(f"a run state of version {self.version} lists {len(self.batches)} steps")

    def save(self, run_dir: Path) -> None:
        """Replace RUN/state.json: the old one or the new one is there, whatever happens."""
        write_atomic(run_dir / FILE, json.dumps({"format": FORMAT, **asdict(self)}).encode())

    @classmethod
    def load(cls, run_dir: Path) -> RunState | None:
        """The state of a run; None when it has none yet. Raises CheckpointError for a file that is not one."""
        path = run_dir / FILE
        if not path.exists():
            if (run_dir / "checkpoints" / "latest").exists():
                raise CheckpointError(
                    f"{run_dir} was written by an older slime_cua, which kept no {FILE}: start a new run_dir"
                )
            return None
        try:
            plain = json.loads(path.read_text())
            if plain.pop("format") != FORMAT:
                raise ValueError("another format")
            plain["batches"] = [Batch(**batch) for batch in plain["batches"]]
            return cls(**plain)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is no run state of this slime_cua: {error}") from error


@dataclass
class SftState:
    """Where the cold start can go on: after `step` optimiser steps, whose checkpoint is in RUN/checkpoints/sft.

    It is there from the first step on: the demonstrations are settled then.
    """

    step: int = 0
    spent_s: float = 0.0

    def save(self, run_dir: Path) -> None:
        write_atomic(run_dir / SFT_FILE, json.dumps({"format": FORMAT, **asdict(self)}).encode())

    @classmethod
    def load(cls, run_dir: Path) -> SftState | None:
        """The last one; None before the training began."""
        path = run_dir / SFT_FILE
        if not path.exists():
            return None
        try:
            plain = json.loads(path.read_text())
            if plain.pop("format") != FORMAT:
                raise ValueError("another format")
            return cls(**plain)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is no state of a cold start: {error}") from error
