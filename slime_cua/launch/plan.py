"""`slime-cua plan`: memory of a training layout, predicted from a model's config alone. Nothing is loaded, no GPU is needed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

EXAMPLES = """
  slime-cua plan --model Qwen3.5-27B --gpus 16 --tp 4
  slime-cua plan --model models/tiny_base --gpus 2 --tp 2 --tokens 6144 --recompute none
  slime-cua plan --model Qwen3.5-35B-A3B --table          all layouts on 8, 16 and 32 H200
"""
TABLE_GPUS = (8, 16, 32)


def main(arguments: list[str]) -> int:
    """Run the command line; its exit code: 1 when the layout does not fit. Raises ConfigError for an illegal one."""
    options = _parser().parse_args(arguments)
    from slime_cua.core.errors import ConfigError

    if not 0 <= options.trained_share <= 1:
        raise ConfigError(f"--trained-share {options.trained_share}: a share from 0 to 1")
    config = model_config(options.model)
    if options.table:
        print(table(config))
        return 0
    if options.gpus % (options.tp):
        raise ConfigError(f"--gpus {options.gpus} is no multiple of --tp {options.tp}")
    return _one(config, options)


def model_config(name: str) -> dict[str, Any]:
    """Of a preset, a Hugging Face folder or a config.json. Raises ConfigError naming the presets."""
    from slime_cua.convert import read_config
    from slime_cua.core.errors import ConfigError
    from slime_cua.trainer.sizes import PRESETS

    path = Path(name)
    if name in PRESETS:
        return PRESETS[name]
    if path.is_dir():
        return read_config(path)
    if path.is_file():
        try:
            plain = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"--model {path} is not valid JSON: {error}") from None
        if not isinstance(plain, dict):
            raise ConfigError(f"--model {path} must hold a JSON object, a model's config.json")
        return plain
    raise ConfigError(f"--model {name}: neither a folder nor a config.json, nor one of {', '.join(PRESETS)}")


def _one(config: dict[str, Any], options: argparse.Namespace) -> int:
    from slime_cua.config.trainer import ParallelConfig
    from slime_cua.trainer.plan import H200_BYTES, USABLE, Workload, largest_micro_batch, plan

    parallel = ParallelConfig(
        tp=options.tp,
        ep=options.ep,
        dp=options.gpus // options.tp,
        sequence_parallel=options.tp > 1,
    )
    work = Workload(
        num_tokens=options.tokens,
        trained_share=options.trained_share,
        recompute=options.recompute,
        is_vision_frozen=not options.train_vision,
        is_optimizer_offloaded=options.offload_optimizer,
    )
    found = plan(config, parallel, work)
    capacity = int((options.gpu_gb * 1e9 if options.gpu_gb else H200_BYTES) * USABLE)
    for name in found.__dataclass_fields__:
        print(f"{name:<12}{getattr(found, name) / 2**30:8.1f} GiB")
    print(f"{'total':<12}{found.total / 2**30:8.1f} GiB of {capacity / 2**30:.1f} usable")
    most = largest_micro_batch(config, parallel, work, capacity)
    print(f"largest micro-batch: {most} tokens a rank, {most * parallel.dp} over all data-parallel ranks")
    return 0 if found.total <= capacity else 1


def table(config: dict[str, Any]) -> str:
    """Markdown: every legal layout of 8, 16 and 32 GPUs with what fits."""
    from slime_cua.config.trainer import ParallelConfig
    from slime_cua.trainer.layouts import layout_faults, num_experts
    from slime_cua.trainer.plan import Workload, largest_micro_batch, plan

    lines = [
        "| GPUs | TP | EP | DP | state GiB | 32K tokens, full recompute, GiB | tokens a GPU that fit: full | none |",
        "|---|---|---|---|---|---|---|---|",
    ]
    experts = num_experts(config)
    for gpus in TABLE_GPUS:
        for tp in (1, 2, 4, 8):
            for ep in (1, 8) if experts else (1,):
                parallel = ParallelConfig(tp=tp, ep=ep, dp=gpus // tp, sequence_parallel=tp > 1)
                if layout_faults(config, parallel):
                    continue
                full, none = Workload(32768), Workload(32768, recompute="none")
                at_32k = plan(config, parallel, full)
                state = at_32k.weights + at_32k.gradients + at_32k.optimizer
                most = [largest_micro_batch(config, parallel, work) for work in (full, none)]
                cells = [gpus, tp, ep, gpus // tp, f"{state / 2**30:.0f}", f"{at_32k.total / 2**30:.0f}"]
                cells += [f"{n:,}" if n else "-" for n in most]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _count(text: str) -> int:
    """A whole number from 1, for argparse."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number}: at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime-cua plan",
        description=__doc__,
        epilog=f"examples:{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", required=True, help="a Hugging Face folder, a config.json, or a preset's name"
    )
    parser.add_argument("--gpus", type=_count, default=8)
    parser.add_argument("--tp", type=_count, default=1)
    parser.add_argument("--ep", type=_count, default=1)
    parser.add_argument("--tokens", type=_count, default=32768, help="trainer.max_tokens_per_rank")
    parser.add_argument("--trained-share", type=float, default=0.07, help="trained tokens / tokens")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="full")
    parser.add_argument("--train-vision", action="store_true", help="trainer.freeze_vision = false")
    parser.add_argument(
        "--offload-optimizer", action="store_true", help="optimiser state on the host between steps"
    )
    parser.add_argument(
        "--gpu-gb", type=float, default=0.0, help="memory of a GPU in GB; default: an H200's 141"
    )
    parser.add_argument(
        "--table", action="store_true", help="all legal layouts on 8, 16 and 32 H200, as Markdown"
    )
    return parser
