"""The part `layouts` of check_h200: loss and gradient norm of one batch under each layout that the GPUs allow.

`python scripts/check_h200_layouts.py FAMILY FOLDER tp=2 ...` is one layout: a fresh model of a small random policy, one step.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_tables import Row, at_most
from check_h200_common import Check, PartFailed

MODELS = {
    "dense": "Qwen3.5, gated delta net and attention",
    "experts": "Qwen3.5-MoE, 4 experts",
    "vision": "Qwen3-VL, deepstack",
}
CASES: tuple[tuple[str, str, int], ...] = (
    ("dense", "", 1),
    ("dense", "max_tokens_per_rank=208", 1),
    ("dense", "tp=2 sequence_parallel=true", 2),
    ("dense", "tp=4 sequence_parallel=true", 4),
    ("experts", "", 1),
    ("experts", "max_tokens_per_rank=208", 1),
    ("experts", "dp=2 ep=2", 2),
    ("experts", "dp=4 ep=4", 4),
    ("experts", "tp=2 dp=2 ep=4 sequence_parallel=true", 4),
    ("vision", "", 1),
    ("vision", "cp=2", 2),
)
"""Family, layout, GPUs. The first of a family is what the others are held against; other micro-batches show the noise."""
LIMITS = {False: (0.01, 0.05), True: (1e-5, 1e-3)}
"""is_cpu -> (of the loss, of the gradient norm): relative differences of bf16, of fp32. Those of bf16 are the goals of tests/gpu."""
TEST_PLACEHOLDER, RANDOM_PLACEHOLDER = 6, 5
"""Ids of an image in the tests' samples and in the random model's tokenizer."""


def layouts(check: Check) -> Iterator[Row]:
    """A row a layout and figure. On GPUs all run side by side."""
    dtype = "fp32" if check.is_cpu else "bf16"
    cases = [(family, keys) for family, keys, gpus in CASES if gpus <= check.gpus]
    if check.gpus == 1:
        cases = [(family, keys) for family, keys in cases if family == "dense"]
    folder, children = check.folder / "layouts", []
    check.finish(check.start("layouts_models", [__file__, str(folder)]))
    for number, (family, keys) in enumerate(cases):
        command = [__file__, str(folder / family), f"dtype={dtype}", *keys.split()]
        children.append(check.start(f"layout_{number}_{family}", command))
        if check.is_cpu:
            with contextlib.suppress(subprocess.TimeoutExpired):
                children[-1].process.wait(max(0.0, check.left_s()))
    lines = ["| family | layout | loss | gradient norm |", "|---|---|---|---|"]
    first: dict[str, dict[str, float]] = {}
    for (family, keys), child in zip(cases, children, strict=True):
        what = f"{family}: {keys or 'one rank'}"
        try:
            found = json.loads(check.finish(child).splitlines()[-1])
        except PartFailed as error:
            yield Row(what, f"failed: {error}", "no failure", False)
            continue
        lines.append(
            f"| {MODELS[family]} | {keys or 'one rank'} | {found['loss']:.6f} | {found['grad_norm']:.6f} |"
        )
        if family not in first:
            first[family] = found
            yield Row(what, f"loss {found['loss']:.5f}, gradient norm {found['grad_norm']:.5f}, {dtype}")
            continue
        for name, limit in zip(("loss", "grad_norm"), LIMITS[check.is_cpu], strict=True):
            apart = abs(found[name] / first[family][name] - 1)
            yield at_most(f"{what}: {name} against one rank, relative", apart, limit)
    check.tables["layouts"] = "\n".join(lines)


def write_models(folder: Path) -> None:
    """One small random model a family. Heads that four divides, widths that the GPU kernels take."""
    from rollout.embedded.random_model import RandomModelSpec, write_random_model
    from tests.numerics.tiny_models import make_qwen3vl

    hybrid = ("linear_attention",) * 3 + ("full_attention",)
    spec = RandomModelSpec(
        kv_heads=4, layer_types=hybrid, linear_key_heads=4, linear_value_heads=8, linear_head_dim=64
    )
    write_random_model(folder / "dense", spec)
    write_random_model(folder / "experts", replace(spec, num_experts=4))
    make_qwen3vl(folder / "vision")


def one_step(folder: Path, keys: Sequence[str]) -> dict[str, float]:
    """Loss and gradient norm of the first supervised step of the folder's model under the layout of `keys`."""
    from slime_cua.config.trainer import ParallelConfig, TrainerConfig
    from slime_cua.trainer.group import LocalTrainerGroup
    from tests.numerics.trainer_cases import make_samples

    values: dict[str, Any] = dict(key.split("=") for key in keys)  # pydantic reads the numbers
    trainer = {name: values.pop(name) for name in ("dtype", "max_tokens_per_rank") if name in values}
    config = TrainerConfig(
        **{"max_tokens_per_rank": 1024, **trainer}, parallel=ParallelConfig(**values), freeze_vision=False
    )
    samples, store = make_samples(with_ten_images=True)
    if folder.name != "vision":
        samples = [_with_placeholder(sample) for sample in samples]
    with LocalTrainerGroup(config) as group:
        group.call("load", folder)
        metrics = group.call("train_step", samples, store, "sft")
    return {"loss": metrics["sft/loss"], "grad_norm": metrics["sft/grad_norm"]}


def _with_placeholder(sample: Any) -> Any:
    """`sample` in the ids of the random model's tokenizer."""
    ids = tuple(
        RANDOM_PLACEHOLDER if token == TEST_PLACEHOLDER else token for token in sample.segment.token_ids
    )
    return sample.model_copy(update={"segment": sample.segment.model_copy(update={"token_ids": ids})})


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write_models(Path(sys.argv[1]))
    else:
        print(json.dumps(one_step(Path(sys.argv[1]), sys.argv[2:])))
