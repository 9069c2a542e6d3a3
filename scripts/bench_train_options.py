"""What is wrong with the command line of scripts/bench_train.py, said before torch is imported or memory is taken."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench_train_switches import VARIANTS

from slime_cua.config.trainer import ParallelConfig
from slime_cua.core.errors import SlimeCuaError

LEAST = {"steps": 1, "warmup": 0, "microbatches": 1, "layers": 0, "curve": 0, "tokens": 1, "tp": 1, "ep": 1}


def check_options(options: argparse.Namespace, variants: Sequence[str], world_size: int) -> None:
    """SystemExit with a sentence for the first option that cannot be."""
    for name, least in LEAST.items():
        if getattr(options, name) < least:
            raise SystemExit(f"--{name} {getattr(options, name)}: at least {least}")
    for name in variants:
        if name not in VARIANTS:
            raise SystemExit(f"--variants: {name!r} is none of {', '.join(VARIANTS)}")
    for flag in ("out", "profile"):
        path: Path | None = getattr(options, flag)
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise SystemExit(f"--{flag} {path}: give a file in a folder that is there")
    if world_size % options.tp:
        raise SystemExit(
            f"--tp {options.tp} does not divide the {world_size} processes that were started: "
            f"torchrun --nproc-per-node {options.tp} scripts/bench_train.py --tp {options.tp}"
        )
    if not options.tiny:
        _check_layout(options, world_size)


def _check_layout(options: argparse.Namespace, world_size: int) -> None:
    from slime_cua.launch.plan import model_config
    from slime_cua.trainer.layouts import layout_faults

    parallel = ParallelConfig(
        tp=options.tp, dp=world_size // options.tp, ep=options.ep, sequence_parallel=options.tp > 1
    )
    try:
        config = model_config(options.model)
        faults = layout_faults(config, parallel, options.model)
    except SlimeCuaError as error:
        raise SystemExit(str(error)) from None
    if faults:
        raise SystemExit(faults[0])
    if "vision_config" not in config:
        raise SystemExit(f"{options.model} has no vision tower: the benchmark's segments are of screenshots")
    most = config["text_config"]["num_hidden_layers"]
    if options.layers > most:
        raise SystemExit(f"--layers {options.layers}: {options.model} has {most}")
