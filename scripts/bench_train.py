"""Training speed and memory at a model's real widths, on one GPU or several, each option switched off in turn.

    python scripts/bench_train.py --model Qwen3.5-27B                         one GPU, as many layers as fit, 32K tokens
    torchrun --nproc-per-node 2 scripts/bench_train.py --tp 2                 two GPUs, tensor and sequence parallel
    python scripts/bench_train.py --recompute full --variants all,plain       chosen rows of the table only
    python scripts/bench_train.py --curve 50 --layers 4 --out tp1.json        losses of 50 steps, to compare:
    torchrun --nproc-per-node 2 scripts/bench_train.py --tp 2 --curve 50 --layers 4 --out tp2.json
    python scripts/bench_train.py --compare tp1.json tp2.json
    python scripts/bench_train.py --tiny                                      the same code on a CPU, small

Weights are random and made on the device. A batch is packed segments of ten screenshots of 1504x832 with 5 to 10 % trained
tokens. Printed for each variant: tokens/s, model TFLOP/s, utilisation of the measured bf16 matrix rate, torch's peak of
allocated memory beside the prediction of `slime-cua plan`; with --out also one JSON line each, and the memory by part.
What happens when is on standard error; a phase there that lasts longer than --phase-s ends the process with its stacks. A variant that fails
is a row that says why. Kernels are compiled and tuned at the first step, so there each layer is a phase.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from bench_train_curves import compare  # noqa: E402
from bench_train_job import Job, this_job  # noqa: E402
from bench_train_model import (  # noqa: E402
    TINY_EXPERTS,
    TINY_TEXT,
    TINY_VISION,
    random_weights,
    with_layers,
    write_hollow_folder,
)
from bench_train_options import check_options  # noqa: E402
from bench_train_segments import make_segments  # noqa: E402
from bench_train_switches import OFF, SWITCHES, VARIANTS, Memory, Swap  # noqa: E402
from bench_train_watch import Phases, layers_marked  # noqa: E402


def main() -> int:
    options = _parser().parse_args()
    if options.compare:
        return compare(*options.compare)
    job = this_job(os.environ)
    names = [name.strip() for name in options.variants.split(",")]
    check_options(options, names, job.world_size)
    bench = Bench(options, job)
    if options.curve:
        bench.curve(options.curve)
    else:
        bench.table(names)
    bench.close()
    return 1 if bench.has_failed else 0


class Bench:
    """One model on one layout."""

    def __init__(self, options: argparse.Namespace, job: Job) -> None:
        self.options, self.job = options, job
        self.phases = Phases(job.rank, options.phase_s)
        self.mark = self.phases.mark
        self.has_failed = False
        """A variant failed otherwise than by memory."""
        self._is_tuned = False
        self.mark("importing torch")
        import torch

        from slime_cua.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
        from slime_cua.trainer.model import PolicyModel
        from slime_cua.trainer.rank import TrainerRank

        self.torch = torch
        self.has_gpu = torch.cuda.is_available()
        self.parallel = ParallelConfig(
            tp=options.tp,
            dp=job.world_size // options.tp,
            ep=options.ep,
            sequence_parallel=options.tp > 1,
        )
        self.model_config = self._model_config()
        self.folder = self._folder()
        self.config = TrainerConfig(
            parallel=self.parallel,
            dtype="bf16" if self.has_gpu else "fp32",
            max_tokens_per_rank=options.tokens,
            recompute=options.recompute,
            freeze_vision=not options.train_vision,
            vision_cache_mb=8192 if options.curve else 0,
            optimizer=OptimizerConfig(lr=1e-5),
            timeout_s=options.timeout_s,
        )
        self.mark("joining the job")
        self.trainer = TrainerRank(self.config, job.rank, job.world_size, job.address, job.port)
        self.mark("making the model")
        with Swap(PolicyModel, "load_weights", random_weights(self.trainer.layout.device)):
            self.trainer.load(self.folder)
        self.mark("drawing screenshots")
        self.samples, self.store = make_segments(
            self.trainer._patches, options.tokens, options.microbatches * self.parallel.dp, options.tiny
        )
        self._release()
        self.mark("ready")

    def close(self) -> None:
        """Leave the job."""
        self.mark("leaving")
        self.trainer.close()
        self.phases.close()

    def say(self, line: str, **values: Any) -> None:
        """A line of the result, by rank 0; `values` as a JSON line in --out."""
        if self.job.rank:
            return
        print(line, flush=True)
        if values and self.options.out:
            with self.options.out.open("a") as file:
                file.write(json.dumps({**self._facts(), **values}) + "\n")

    def table(self, names: list[str]) -> None:
        """One row a variant; of one that fails, why."""
        self.mark("measuring the matrix rate")
        peak_rate = self._matrix_rate() if self.has_gpu else float("nan")
        facts = self._facts()
        self.say(
            f"{facts['model']}: {facts['layers']} layers, TP={facts['tp']} DP={facts['dp']} EP={facts['ep']}, recompute "
            f"{facts['recompute']}, {facts['max_tokens']} tokens a micro-batch, bf16 matrix rate {peak_rate / 1e12:.0f} TFLOP/s\n"
            "| variant | what | s a step | tokens/s | model TFLOP/s a GPU | MFU % | peak GiB | predicted GiB |\n"
            "|---|---|---|---|---|---|---|---|"
        )
        memory = Memory(self.torch)
        for place, name in enumerate(names):
            if OFF[name] == {"split"} and self.parallel.tp == 1:
                continue
            left = ",".join(names[place:])
            self.phases.hint = f"Rows before it are on standard output; not done: --variants '{left}'"
            try:
                self._row(name, peak_rate, memory)
            except Exception as error:
                self._note_failure(name, error)
                if self.job.world_size > 1:  # the other ranks are elsewhere: no collective would meet
                    raise
            self._release()

    def _note_failure(self, name: str, error: Exception) -> None:
        """Rows after one that failed are worth their time."""
        is_memory = isinstance(error, self.torch.OutOfMemoryError)
        reason = "out of memory" if is_memory else f"failed: {type(error).__name__}"
        if not is_memory:
            self.has_failed = True
            traceback.print_exception(error)
        self.say(f"| {name} | {VARIANTS[name]} | {reason} | | | | | |", variant=name, failure=str(error))

    def _row(self, name: str, peak_rate: float, memory: Memory) -> None:
        off = OFF[name]
        with ExitStack() as stack:
            for part in sorted(off):
                stack.enter_context(SWITCHES[part](self))
            self._warm_up(name)
            if self.has_gpu:
                self.torch.cuda.reset_peak_memory_stats()
            times = [self._step(f"{name}: step {n + 1}") for n in range(self.options.steps)]
            peak = self.torch.cuda.max_memory_allocated() if self.has_gpu else 0
        work, seconds = self._work(), statistics.median(times)
        rate = work["flops"] / seconds / self.job.world_size
        predicted = {} if off else self._predicted(work)
        self.say(
            f"| {name} | {VARIANTS[name]} | {seconds:.3f} | {work['tokens'] / seconds:,.0f} | {rate / 1e12:.1f} | "
            f"{100 * rate / peak_rate:.1f} | {peak / 2**30:.1f} | {sum(predicted.values()) / 2**30:.1f} |",
            variant=name,
            times=times,
            peak=peak,
            predicted=predicted,
            matrix_rate=peak_rate,
            rate=rate,
            **work,
        )
        if not off:
            with memory.watching(self.trainer):
                self._step("memory by part")
            self.say(f"memory by part: {memory.found}", memory=memory.found, predicted=predicted, **work)
            if self.options.profile:
                self._profile(self.options.profile)

    def curve(self, num_steps: int) -> None:
        """Losses of `num_steps` supervised steps over one batch, as JSON."""
        losses: list[float] = []
        for number in range(num_steps):
            self.mark(f"step {number + 1} of {num_steps}, loss {losses[-1] if losses else math.nan:.4f}")
            with self._small_phases("step 1") if number == 0 else nullcontext():
                losses.append(self.trainer.train_step(self.samples, self.store, "sft")["sft/loss"])
        result = {**self._facts(), "dtype": self.config.dtype, "losses": losses}
        if self.job.rank == 0 and self.options.out is not None:
            self.options.out.write_text(json.dumps(result))
        self.say(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {num_steps} steps, TP={self.parallel.tp}")

    def _profile(self, target: Path) -> None:
        """Where the device's time of one step goes."""
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.has_gpu else [])]
        with profile(activities=kinds) as found:
            self._step("profiled step")
        order = "self_cuda_time_total" if self.has_gpu else "self_cpu_time_total"
        if self.job.rank == 0:
            table = found.key_averages().table(
                sort_by=order, row_limit=60, max_name_column_width=90, top_level_events_only=False
            )
            target.write_text(table)

    def _warm_up(self, name: str) -> None:
        """Untimed steps of a variant: one, and --warmup more until one has passed; the first of all layer by layer."""
        for number in range(1 if self._is_tuned else 1 + self.options.warmup):
            what = f"{name}: warm-up {number + 1}"
            with nullcontext() if self._is_tuned else self._small_phases(what):
                self._step(what)
            self._is_tuned = True

    @contextmanager
    def _small_phases(self, what: str) -> Iterator[None]:
        """Inside, micro-batches, layers and the update of a step are phases."""
        from slime_cua.trainer import progress

        def mark(part: str) -> None:
            self.mark(f"{what}: {part}")

        layers = self.trainer.model._text.decoder.layers
        with Swap(progress, "mark", mark), layers_marked(layers, mark):
            yield

    def _step(self, what: str) -> float:
        """Seconds of one training step."""
        self.mark(what)
        began = time.perf_counter()
        self.trainer.train_step(self.samples, self.store, "sft")
        if self.has_gpu:
            self.torch.cuda.synchronize()
        return time.perf_counter() - began

    def _release(self) -> None:
        """Give back what no tensor uses, so that one part's fragments do not bother the next."""
        gc.collect()
        if self.has_gpu:
            self.torch.cuda.empty_cache()

    def _facts(self) -> dict[str, Any]:
        options, parallel = self.options, self.parallel
        return {
            "model": "tiny" if options.tiny else options.model,
            "layers": self.model_config["text_config"]["num_hidden_layers"],
            "tp": parallel.tp,
            "dp": parallel.dp,
            "ep": parallel.ep,
            "recompute": options.recompute,
            "max_tokens": options.tokens,
            "train_vision": options.train_vision,
            "transformer_engine": _version("transformer_engine"),
            "fla": _version("fla"),
        }

    def _work(self) -> dict[str, Any]:
        """Tokens and model FLOPs of one step: packed as the trainer does, padding not counted."""
        from slime_cua.trainer.flops import forward_flops
        from slime_cua.trainer.sizes import ModelShape

        shape = ModelShape.from_config(self.model_config)
        patches = self.trainer._patches
        batch = type(self.trainer)._pack(self.trainer, self.samples)
        total, tokens, rows, images, largest = 0.0, 0, 0, 0, 0
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
            largest = max(largest, packed.num_tokens)
            images += sum(seen) // shape.vision.merge**2
        return {"flops": total, "tokens": tokens, "rows": rows, "image_tokens": images, "largest": largest}

    def _predicted(self, work: dict[str, Any]) -> dict[str, int]:
        """Bytes by part, for the largest micro-batch of the step."""
        from slime_cua.trainer.plan import Workload, plan

        load = Workload(
            work["largest"],
            trained_share=work["rows"] / work["tokens"],
            image_share=work["image_tokens"] / work["tokens"],
            recompute=self.options.recompute,
            is_vision_frozen=self.config.freeze_vision,
        )
        return dict(vars(plan(self.model_config, self.parallel, load)))

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
            if "num_experts" in plain["text_config"]:
                plain["text_config"].update(TINY_EXPERTS)
            plain["vision_config"].update(TINY_VISION)
        wanted = self.options.layers or (4 if self.options.tiny else self._layers_that_fit(plain))
        return with_layers(plain, wanted)

    def _layers_that_fit(self, plain: dict[str, Any]) -> int:
        from slime_cua.trainer.plan import H200_BYTES, USABLE, Workload, plan

        total = self.torch.cuda.mem_get_info()[1] if self.has_gpu else H200_BYTES
        for layers in range(plain["text_config"]["num_hidden_layers"] // 4 * 4, 0, -4):
            work = Workload(self.options.tokens, recompute=self.options.recompute)
            if plan(with_layers(plain, layers), self.parallel, work).total <= USABLE * total:
                return layers
        raise SystemExit(
            f"not even four layers fit with --tokens {self.options.tokens}: lower it, or raise --tp"
        )

    def _folder(self) -> Path:
        """The random model's folder; rank 0 writes it, the others wait."""
        layers = self.model_config["text_config"]["num_hidden_layers"]
        kind = Path(self.options.model).name + ("-tiny" if self.options.tiny else "")
        folder = Path(self.options.scratch) / f"{kind}-{layers}"
        done = folder / "done"
        if self.job.rank == 0 and not done.is_file():
            self.mark(f"writing {folder}")
            write_hollow_folder(folder, self.model_config)
            done.write_text("")
        while not done.is_file():
            if self.phases.seconds() > self.options.timeout_s:
                raise SystemExit(f"{folder} was not written within {self.options.timeout_s:.0f} s")
            time.sleep(0.2)
        return folder


def _version(package: str) -> str:
    """Of an imported package; "stand-in" for ours, "" for none."""
    module = sys.modules.get(package)
    if module is None:
        return ""
    return str(getattr(module, "__version__", "stand-in")) + (
        " stand-in" if hasattr(module, "IS_STANDIN") else ""
    )


def _arguments() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "--model", {"default": "Qwen3.5-27B", "help": "preset, folder or config.json (see slime-cua plan)"}
    yield "--layers", {"type": int, "default": 0, "help": "0: as many as fit"}
    yield "--tokens", {"type": int, "default": 0, "help": "a micro-batch of a rank; default 32768"}
    yield "--microbatches", {"type": int, "default": 2, "help": "a step and data-parallel rank"}
    yield "--tp", {"type": int, "default": 1}
    yield "--ep", {"type": int, "default": 1}
    yield "--recompute", {"choices": ("none", "selective", "full"), "default": "none"}
    yield "--train-vision", {"action": "store_true"}
    yield "--steps", {"type": int, "default": 3, "help": "timed steps of a variant; the median counts"}
    yield (
        "--warmup",
        {"type": int, "default": 2, "help": "before the first variant; each has one more of its own"},
    )
    yield "--variants", {"default": ",".join(VARIANTS), "help": "comma-separated"}
    yield "--curve", {"type": int, "default": 0, "help": "steps of a loss curve instead of the table"}
    yield "--out", {"type": Path, "default": None, "help": "JSON file of the curve; JSON lines of the table"}
    yield "--compare", {"nargs": 2, "type": Path, "default": None, "help": "two such files"}
    yield (
        "--phase-s",
        {"type": float, "default": 240.0, "help": "deadline of a phase, as told on standard error"},
    )
    yield "--timeout-s", {"type": float, "default": 600.0, "help": "of a collective"}
    yield (
        "--profile",
        {"type": Path, "default": None, "help": "file for the table of kernels of one step of all"},
    )
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
