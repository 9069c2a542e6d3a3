"""Pretraining of a tiny base policy that sees and points, on generated screens, with our Megatron trainer.

    python -m slime_cua.synthesis.pretrain --config recipes/pretrain_tiny_base.yaml run_dir=runs/tiny_base minutes=9

Ends by the clock, saves and resumes; run_dir/final is the Hugging Face folder. One process a rank; worker processes draw.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from slime_cua.config.base import ConfigModel, load, save_resolved
from slime_cua.config.trainer import TrainerConfig
from slime_cua.core.errors import ConfigError
from slime_cua.synthesis.initial_weights import InitConfig, write_initial_folder
from slime_cua.synthesis.pretrain_data import Batch, Encoder, Stage, make_batch, shape_of

NUM_SLOTS = 4
PACE = ("minutes", "num_workers", "save_every_minutes", "print_every_s", "check_every_s", "num_checked")
"""Settings that may change when a run goes on."""

WATCHED = {
    "one": "one thing by colour",
    "six": "six buttons by colour",
    "shape": "mixed: point_shape",
    "both": "mixed: point_both",
    "place": "mixed: point_place",
    "size": "mixed: point_size",
    "close": "mixed: point_close",
    "word": "reading: button by word",
    "chat": "chat: six buttons by colour",
    "chatplace": "chat: point_place",
}
"""Short name in the progress line -> test of the gate."""


class PretrainConfig(ConfigModel):
    """Everything of a pretraining run."""

    model: str = "models/tiny_base"
    """Folder with config, tokenizer and processor files; its weights, if any, are not read."""
    run_dir: str = "runs/tiny_base"
    minutes: float = Field(9.0, gt=0)
    """Time of training, start-up and exports not counted; the learning rate falls to its end over it."""
    seed: int = Field(0, ge=0, lt=1_000_000)
    batch_screens: int = Field(256, ge=2)
    """Screens of an optimiser step, over all ranks."""
    num_workers: int = Field(14, ge=1)
    """Processes that draw screens, a rank."""
    num_chunks: int = Field(32, ge=1)
    """Pieces in which a batch is drawn; must divide half of a rank's screens."""
    save_every_minutes: float = Field(4.0, gt=0)
    """A checkpoint to resume from, and run_dir/hf_latest."""
    print_every_s: float = Field(2.0, gt=0)
    check_every_s: float = Field(20.0, gt=0)
    """Held-out hit rates."""
    num_checked: int = Field(96, ge=8)
    """Questions of each held-out test."""
    warmup_steps: int = Field(50, ge=1)
    final_rate: float = Field(0.03, ge=0, le=1)
    """Share of the learning rate at the end."""
    init: InitConfig = InitConfig()
    text_weight: float = Field(0.2, ge=0)
    """Weight in the loss of a token of a text without a screen; a token of an answer about a screen has 1."""
    snippet_weight: float = Field(0.5, ge=0)
    """Weight of a token of a snippet that answers in a chat turn."""
    stages: tuple[Stage, ...]
    trainer: TrainerConfig

    @model_validator(mode="after")
    def _fits(self) -> PretrainConfig:
        if [stage.until for stage in self.stages] != sorted({stage.until for stage in self.stages}):
            raise ValueError("stages must come in the order of their `until`, each later than the one before")
        if self.trainer.parallel.pp > 1 or self.trainer.parallel.cp > 1:
            raise ValueError("trainer.parallel: pretraining runs with dp and tp only")
        unknown = {name for stage in self.stages for name in stage.leave_when} - set(WATCHED)
        if unknown:
            raise ValueError(f"stages.leave_when: unknown {sorted(unknown)}; known: {', '.join(WATCHED)}")
        if self.batch_screens % (2 * self.trainer.parallel.dp * self.num_chunks):
            raise ValueError(
                f"batch_screens {self.batch_screens} must be a multiple of 2 x dp x num_chunks = "
                f"{2 * self.trainer.parallel.dp * self.num_chunks}"
            )
        return self


@dataclass(frozen=True)
class Place:
    """Which rank this process is, and where the ranks meet."""

    rank: int
    world_size: int
    port: int


def stage_at(stages: Sequence[Stage], progress: float, at_least: int = 0) -> int:
    """Index of the stage at `progress` (0..1) of the training time, not before stage `at_least`."""
    by_time = next((i for i, stage in enumerate(stages) if progress < stage.until), len(stages) - 1)
    return max(by_time, at_least)


def rate_at(step: int, progress: float, config: PretrainConfig) -> float:
    """Learning rate: linear warm-up over steps, then a cosine over time down to final_rate."""
    peak = config.trainer.optimizer.lr
    cosine = (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2
    return (
        peak
        * min(1.0, (step + 1) / config.warmup_steps)
        * (config.final_rate + (1 - config.final_rate) * cosine)
    )


def saved_progress(run_dir: Path) -> dict[str, Any]:
    """{"step", "spent_s", "stage"} of the newest whole checkpoint; zeros without one."""
    from slime_cua.trainer.checkpoint import latest

    step = latest(run_dir / "checkpoints")
    if step is None:
        return {"step": 0, "spent_s": 0.0, "stage": 0}
    known: dict[str, Any] = json.loads((run_dir / "progress.json").read_text())
    return {"step": step, **known[str(step)]}


def run_rank(config: PretrainConfig, place: Place) -> None:
    """Train on one rank, from the newest checkpoint of run_dir if there is one. All ranks run this together."""
    from slime_cua.synthesis.feed import Feed
    from slime_cua.synthesis.pretrain_loop import Training

    encoder = Encoder(Path(config.model))
    parallel = config.trainer.parallel
    first = saved_progress(Path(config.run_dir))
    shapes = [
        shape_of(stage.lengths, config.batch_screens // parallel.dp // w, w, math.prod(encoder.screen_grid))
        for stage in config.stages
        for w in (1, 2)
    ]

    def fill(rng: np.random.Generator, plan: int, batch: Batch) -> None:
        make_batch(rng, config.stages[plan // 2], encoder, batch)

    feed = Feed(
        shapes,
        fill,
        config.num_workers,
        config.num_chunks,
        seed=(config.seed, place.rank // parallel.tp),
        first_batch=first["step"],
        num_slots=NUM_SLOTS,
    )
    try:
        Training(config, place, feed, encoder, first).run()
    finally:
        feed.close()


def prepare(config: PretrainConfig) -> None:
    """Write the resolved config and the initial weights, unless the run was begun before with the same config."""
    run_dir = Path(config.run_dir)
    resolved = run_dir / "config.yaml"
    if resolved.is_file():
        before = load(PretrainConfig, resolved)
        pace = {name: getattr(config, name) for name in PACE}
        if before.model_copy(update=pace) != config:
            raise ConfigError(
                f"{run_dir} holds a run with another config: give another run_dir, or delete it"
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / "initial" / "model.safetensors").is_file():
        draft = run_dir / ".unfinished-initial"
        write_initial_folder(Path(config.model), draft, config.init, config.seed)
        draft.rename(run_dir / "initial")
    save_resolved(config, resolved)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Pretrain a tiny base policy on generated screens.")
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_argument("--minutes", type=float, help="the same as minutes=...")
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. trainer.parallel.dp=2")
    given = parser.parse_args(arguments)
    overrides = [*given.overrides, *([f"minutes={given.minutes}"] if given.minutes else [])]
    config = load(PretrainConfig, given.config, overrides)
    from slime_cua.trainer.group import free_port

    context = multiprocessing.get_context("spawn")
    preparation = context.Process(target=prepare, args=(config,))
    preparation.start()
    preparation.join()
    if preparation.exitcode:
        raise SystemExit(preparation.exitcode)
    world_size, port = config.trainer.parallel.world_size, free_port()
    if world_size == 1:
        run_rank(config, Place(0, 1, port))
        return
    ranks = [
        context.Process(target=run_rank, args=(config, Place(rank, world_size, port)))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main()
