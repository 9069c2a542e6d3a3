"""Training speed and memory at a model's real widths, on one GPU or several, each option switched off in turn.

    python scripts/bench_train.py --model Qwen3.5-27B                         one GPU, as many layers as fit, 32K tokens
    torchrun --nproc-per-node 2 scripts/bench_train.py --tp 2                 two GPUs, tensor and sequence parallel
    python scripts/bench_train.py --recompute full --variants all,plain       chosen rows of the table only
    python scripts/bench_train.py --curve 50 --layers 4 --out tp1.json        losses of 50 steps, to compare:
    torchrun --nproc-per-node 2 scripts/bench_train.py --tp 2 --curve 50 --layers 4 --out tp2.json
    python scripts/bench_train.py --compare tp1.json tp2.json
    python scripts/bench_train.py --tiny                                      the same code on a CPU, small

Weights are random: a folder is written to --scratch once. A batch is packed segments of ten screenshots of 1504x832 with 5 to 10 %
trained tokens. Printed for each variant: tokens/s, model TFLOP/s, utilisation of the measured bf16 matrix rate, torch's peak of
allocated memory beside the prediction of `slime-cua plan`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from bench_train_parts import SWITCHES, make_segments, write_random_folder  # noqa: E402

TINY_TEXT = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TINY_VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64}
VARIANTS = {
    "all": "everything on",
    "no packing": "one segment a micro-batch, padded to the longest",
    "all rows": "every row through the fused head",
    "plain log-prob": "trained rows, fp32 logits and log-softmax of torch",
    "whole tower": "each tensor-parallel rank runs the tower over all images",
    "plain": "all four off: padding, all-row fp32 logits, undivided tower",
}
OFF = {
    "all": frozenset[str](),
    "no packing": frozenset({"packing"}),
    "all rows": frozenset({"rows"}),
    "plain log-prob": frozenset({"fused"}),
    "whole tower": frozenset({"split"}),
    "plain": frozenset({"packing", "rows", "fused", "split"}),
}


@dataclass(frozen=True)
class Job:
    """This process among those of the benchmark."""

    rank: int
    world_size: int
    address: str
    port: int


def main() -> int:
    options = _parser().parse_args()
    if options.compare:
        return compare(*options.compare)
    job = Job(
        int(os.environ.get("RANK", 0)),
        int(os.environ.get("WORLD_SIZE", 1)),
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        # The launcher's store listens on MASTER_PORT itself.
        int(os.environ.get("MASTER_PORT", 29400)) + 1,
    )
    if job.world_size % options.tp:
        raise SystemExit(
            f"--tp {options.tp} does not divide the {job.world_size} processes that were started"
        )
    bench = Bench(options, job)
    if options.curve:
        bench.curve(options.curve, options.out)
    else:
        bench.table([name.strip() for name in options.variants.split(",")])
    return 0


class Bench:
    """One model on one layout."""

    def __init__(self, options: argparse.Namespace, job: Job) -> None:
        import torch

        from slime_cua.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
        from slime_cua.trainer.rank import TrainerRank

        self.options, self.job, self.torch = options, job, torch
        self.has_gpu = torch.cuda.is_available()
        self.parallel = ParallelConfig(
            tp=options.tp, dp=job.world_size // options.tp, sequence_parallel=options.tp > 1
        )
        self.model_config = self._model_config()
        self.folder = self._folder()
        self.config = TrainerConfig(
            parallel=self.parallel,
            dtype="bf16" if self.has_gpu else "fp32",
            max_tokens_per_rank=options.tokens,
            recompute=options.recompute,
            vision_cache_mb=0,
            optimizer=OptimizerConfig(lr=1e-5),
            timeout_s=1800,
        )
        self.trainer = TrainerRank(self.config, job.rank, job.world_size, job.address, job.port)
        self.trainer.load(self.folder)
        self.samples, self.store = make_segments(self.trainer, options, self.parallel.dp)

    def say(self, line: str) -> None:
        if self.job.rank == 0:
            print(line, flush=True)

    def table(self, names: list[str]) -> None:
        """One row a variant."""
        peak_rate = self._matrix_rate() if self.has_gpu else float("nan")
        layers = self.model_config["text_config"]["num_hidden_layers"]
        self.say(
            f"{self.options.model}: {layers} layers, TP={self.parallel.tp} DP={self.parallel.dp}, recompute {self.options.recompute}, "
            f"bf16 matrix rate {peak_rate / 1e12:.0f} TFLOP/s\n"
            "| variant | what | tokens/s | model TFLOP/s a GPU | MFU % | peak GiB | predicted GiB |\n|---|---|---|---|---|---|---|"
        )
        for name in names:
            if name not in VARIANTS:
                raise SystemExit(f"--variants: {name!r} is none of {', '.join(VARIANTS)}")
            if "fused" in OFF[name] and self.parallel.tp > 1:
                self.say(f"| {name} | {VARIANTS[name]} | only at TP=1 | | | | |")
                continue
            seconds, peak, work = self._measure(OFF[name])
            rate = work["flops"] / seconds / self.job.world_size
            share = 100 * rate / peak_rate
            predicted = self._predicted(work) / 2**30 if not OFF[name] else float("nan")
            self.say(
                f"| {name} | {VARIANTS[name]} | {work['tokens'] / seconds:,.0f} | {rate / 1e12:.1f} | {share:.1f} | "
                f"{peak / 2**30:.1f} | {predicted:.1f} |"
            )

    def curve(self, num_steps: int, out: Path | None) -> None:
        """Losses of `num_steps` supervised steps over one batch, as JSON."""
        losses = [
            self.trainer.train_step(self.samples, self.store, "sft")["sft/loss"] for _ in range(num_steps)
        ]
        result = {"tp": self.parallel.tp, "dtype": self.config.dtype, "losses": losses}
        if self.job.rank == 0 and out is not None:
            out.write_text(json.dumps(result))
        self.say(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {num_steps} steps, TP={self.parallel.tp}")

    def _measure(self, off: frozenset[str]) -> tuple[float, int, dict[str, Any]]:
        """(seconds a step, bytes at the peak, work of a step with nothing wasted)."""
        torch = self.torch
        with ExitStack() as stack:
            for part in sorted(off):
                stack.enter_context(SWITCHES[part](self))
            for _ in range(self.options.warmup):
                self.trainer.train_step(self.samples, self.store, "sft")
            if self.has_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            for _ in range(self.options.steps):
                self.trainer.train_step(self.samples, self.store, "sft")
            if self.has_gpu:
                torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / self.options.steps
        peak = torch.cuda.max_memory_allocated() if self.has_gpu else 0
        return seconds, peak, self._work()

    def _work(self) -> dict[str, Any]:
        """Tokens and model FLOPs of one step: packed as the trainer does, padding not counted."""
        from slime_cua.trainer.flops import forward_flops
        from slime_cua.trainer.sizes import ModelShape

        shape = ModelShape.from_config(self.model_config)
        patches = self.trainer._patches
        batch = type(self.trainer)._pack(self.trainer, self.samples)
        total, tokens, rows, images = 0.0, 0, 0, 0
        for packed in (p for share in batch.micro_batches for p in share if p.num_segments):
            lengths = [
                end - begin for begin, end in zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False)
            ][: packed.num_segments]
            seen = [
                rows_ * columns
                for rows_, columns in (
                    patches.grid_hw(r.width_px, r.height_px) for r in packed.distinct_images
                )
            ]
            flops = forward_flops(shape, [int(n) for n in lengths], packed.num_trained, seen)
            total += flops.training(is_vision_frozen=self.config.freeze_vision)
            tokens += int(sum(lengths))
            rows += packed.num_trained
            images += sum(seen) // shape.vision.merge**2
        return {"flops": total, "tokens": tokens, "rows": rows, "image_tokens": images}

    def _predicted(self, work: dict[str, Any]) -> int:
        from slime_cua.trainer.plan import Workload, plan

        load = Workload(
            self.options.tokens,
            trained_share=work["rows"] / work["tokens"],
            image_share=work["image_tokens"] / work["tokens"],
            recompute=self.options.recompute,
        )
        return plan(self.model_config, self.parallel, load).total

    def _matrix_rate(self) -> float:
        """FLOP/s of a large bf16 matrix product here."""
        torch, size = self.torch, 8192
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for _ in range(10):
            a @ b
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(50):
            a @ b
        torch.cuda.synchronize()
        return 50 * 2 * size**3 / (time.perf_counter() - began)

    def _model_config(self) -> dict[str, Any]:
        """The preset's, with as many layers as fit (a multiple of four) or --layers."""
        from slime_cua.launch.plan import model_config

        plain = json.loads(json.dumps(model_config(self.options.model)))
        if self.options.tiny:
            plain["text_config"].update(TINY_TEXT)
            plain["vision_config"].update(TINY_VISION)
        wanted = self.options.layers or (4 if self.options.tiny else self._layers_that_fit(plain))
        plain["text_config"]["num_hidden_layers"] = wanted
        return plain

    def _layers_that_fit(self, plain: dict[str, Any]) -> int:
        from slime_cua.trainer.plan import H200_BYTES, USABLE, Workload, plan

        total = self.torch.cuda.mem_get_info()[1] if self.has_gpu else H200_BYTES
        for layers in range(plain["text_config"]["num_hidden_layers"] // 4 * 4, 0, -4):
            plain["text_config"]["num_hidden_layers"] = layers
            work = Workload(self.options.tokens, recompute=self.options.recompute)
            if plan(plain, self.parallel, work).total <= USABLE * total:
                return layers
        raise SystemExit(
            f"not even four layers fit with --tokens {self.options.tokens}: lower it, or raise --tp"
        )

    def _folder(self) -> Path:
        """The random model's folder; rank 0 writes it, the others wait."""
        layers = self.model_config["text_config"]["num_hidden_layers"]
        kind = "tiny" if self.options.tiny else self.options.model
        folder = Path(self.options.scratch) / f"{kind}-{layers}"
        if self.job.rank == 0 and not (folder / "done").is_file():
            write_random_folder(folder, self.model_config)
        deadline = time.monotonic() + 1800
        while not (folder / "done").is_file():
            if time.monotonic() > deadline:
                raise SystemExit(f"{folder} was not written within half an hour")
            time.sleep(1)
        return folder


def compare(first: Path, second: Path) -> int:
    """Print how far two curves are apart; 0 when they agree within bf16 noise (2 % of the loss) at every step."""
    curves = [json.loads(Path(path).read_text()) for path in (first, second)]
    pairs = list(zip(curves[0]["losses"], curves[1]["losses"], strict=True))
    worst = max(abs(a - b) / max(abs(a), 1e-6) for a, b in pairs)
    print(
        f"TP={curves[0]['tp']} and TP={curves[1]['tp']}, {len(pairs)} steps: largest difference {100 * worst:.2f} % of the loss"
    )
    return 0 if worst < 0.02 else 1


def _arguments() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "--model", {"default": "Qwen3.5-27B", "help": "preset, folder or config.json (see slime-cua plan)"}
    yield "--layers", {"type": int, "default": 0, "help": "0: as many as fit"}
    yield "--tokens", {"type": int, "default": 0, "help": "a micro-batch of a rank; default 32768"}
    yield "--microbatches", {"type": int, "default": 2, "help": "a step and data-parallel rank"}
    yield "--tp", {"type": int, "default": 1}
    yield "--recompute", {"choices": ("none", "selective", "full"), "default": "none"}
    yield "--steps", {"type": int, "default": 3}
    yield "--warmup", {"type": int, "default": 2}
    yield "--variants", {"default": ",".join(VARIANTS), "help": "comma-separated"}
    yield "--curve", {"type": int, "default": 0, "help": "steps of a loss curve instead of the table"}
    yield "--out", {"type": Path, "default": None, "help": "JSON file of the curve"}
    yield "--compare", {"nargs": 2, "type": Path, "default": None, "help": "two such files"}
    yield "--scratch", {"default": "/tmp/bench_train", "help": "where the random model is written"}


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def parse_args(self, *args: Any, **kwargs: Any) -> Any:
            options = super().parse_args(*args, **kwargs)
            options.tokens = options.tokens or (512 if options.tiny else 32768)
            return options

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, keywords in _arguments():
        parser.add_argument(name, **keywords)
    parser.add_argument("--tiny", action="store_true", help="tiny widths and images, for a CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
