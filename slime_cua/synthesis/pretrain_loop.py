"""The loop of one pretraining rank: batches of screens in, optimiser steps, hit rates, checkpoints, a Hugging Face folder."""

from __future__ import annotations

import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megatron_patches
from slime_cua.core.files import write_atomic
from slime_cua.evaluation import pointing
from slime_cua.synthesis.feed import Feed
from slime_cua.synthesis.pretrain import NUM_SLOTS, WATCHED, Place, PretrainConfig, rate_at, stage_at
from slime_cua.synthesis.pretrain_data import Encoder
from slime_cua.synthesis.screen_batches import HeldOut, pin, to_device
from slime_cua.synthesis.turns import CARRY, FILL, KIND_NAMES, TEXT
from slime_cua.trainer.batch import Microbatch
from slime_cua.trainer.images import PatchConfig
from slime_cua.trainer.rank import TrainerRank


class Training:
    """Everything that one rank holds while it trains. first: where an earlier run stopped, as of saved_progress."""

    def __init__(
        self, config: PretrainConfig, place: Place, feed: Feed, encoder: Encoder, first: dict[str, Any]
    ) -> None:
        self.config, self.feed = config, feed
        self.step: int = first["step"]
        self.spent_s: float = first["spent_s"]
        self.stage: int = first["stage"]
        self.run_dir = Path(config.run_dir)
        self.is_chief = place.rank == 0
        self.trainer = TrainerRank(
            config.trainer, place.rank, place.world_size, master_port=place.port, seed=config.seed
        )
        self.trainer.load(self.run_dir / "initial")
        if self.step:
            self.trainer.restore(self.run_dir / "checkpoints")
        self.device = self.trainer.layout.device
        self.patches = PatchConfig.from_hf(config.model)
        self._is_gpu = self.device.type == "cuda"
        self._copies: Any = torch.cuda.Stream() if self._is_gpu else None
        if self._is_gpu and not pin(feed):
            self._say("the memory of the screens could not be page-locked: copies to the GPU will wait")
        tests = {test.name: test for test in pointing.TESTS}
        with megatron_patches.cpu_scope():
            self._held_out = {
                short: HeldOut(
                    [(a.screen, a.question) for a in pointing.draw(tests[name], config.num_checked)],
                    tests[name].is_chat,
                    encoder,
                    self.patches,
                    self.device,
                )
                for short, name in WATCHED.items()
            }
        self._logp_sum = torch.zeros(len(KIND_NAMES), device=self.device)
        self._count = torch.zeros(len(KIND_NAMES), device=self.device)
        self._weight = torch.ones(len(KIND_NAMES), device=self.device)
        self._weight[TEXT] = config.text_weight
        self._weight[[CARRY, FILL]] = config.snippet_weight
        self._grad_norm = 0.0
        self._waited_s = 0.0

    def run(self) -> None:
        """Train until the time is over, then export run_dir/final."""
        config, limit_s = self.config, self.config.minutes * 60
        started = time.monotonic() - self.spent_s
        elapsed = printed = self.spent_s
        checked, saved, printed_step = -1e9, self.spent_s, self.step
        for _ in range(NUM_SLOTS - 1):
            self._open(elapsed / limit_s)
        ready = self._next()
        while elapsed < limit_s:
            batch, kind_R, event = ready
            if event is not None:
                event.synchronize()
                torch.cuda.current_stream().wait_event(event)
            self._open(elapsed / limit_s)
            rate = rate_at(self.step, elapsed / limit_s, config)
            self._backward(batch, kind_R)
            ready = self._next()
            with megatron_patches.cpu_scope():
                self._grad_norm = self.trainer.optimizer.step(rate)["grad_norm"]
            self.step += 1
            elapsed = self._clock(started)
            if elapsed - printed >= config.print_every_s:
                self._report(elapsed, elapsed - printed, self.step - printed_step, rate)
                printed, printed_step = elapsed, self.step
            if elapsed - checked >= config.check_every_s:
                self._check(elapsed)
                checked = elapsed
            if elapsed - saved >= config.save_every_minutes * 60 and elapsed < limit_s:
                self._save(elapsed)
                saved = elapsed
        self._check(elapsed)
        self._save(elapsed)
        self.trainer.export_hf(self.run_dir / "final", dtype="bf16")
        self._say(f"done after {self.step} steps, {elapsed / 60:.1f} min: {self.run_dir / 'final'}")
        self.trainer.close()

    def _open(self, progress: float) -> None:
        """Plan one more batch: the stage by the clock, one or two screens a sequence by chance."""
        number = self.step + self.feed.num_open
        self.stage = stage = stage_at(self.config.stages, progress, self.stage)
        draw = np.random.default_rng([self.config.seed, number]).random()
        self.feed.open_batch(2 * stage + int(draw < self.config.stages[stage].two_screens_share))

    def _next(self) -> tuple[Microbatch, torch.Tensor, Any]:
        """The next batch on the device, and the event after its copies; None on CPU."""
        asked = time.monotonic()
        _, batch = self.feed.take()
        self._waited_s += time.monotonic() - asked
        if not self._is_gpu:
            return *to_device(batch, self.patches, self.device), None
        with torch.cuda.stream(self._copies):
            microbatch, kind_R = to_device(batch, self.patches, self.device)
            event = self._copies.record_event()
        for tensor in (*(getattr(microbatch, f.name) for f in fields(microbatch)), kind_R):
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(torch.cuda.current_stream())
        return microbatch, kind_R, event

    def _backward(self, batch: Microbatch, kind_R: torch.Tensor) -> None:
        """Gradients of the weighted mean negative log-prob over the trained tokens of all ranks."""
        trainer, weight_R = self.trainer, self._weight[kind_R]
        total = weight_R.sum()
        if trainer.layout.dp_size > 1:
            from megatron.core import mpu

            torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group())
        with megatron_patches.cpu_scope():
            trainer.optimizer.zero_grad()
            logp_R, _ = trainer.model.logprobs(batch, 1.0)
            (-(weight_R * logp_R).sum() / total).backward()
            trainer.optimizer.reduce_gradients()
            self._logp_sum.index_add_(0, kind_R, logp_R.detach())
            self._count.index_add_(0, kind_R, torch.ones_like(logp_R))

    def _clock(self, started: float) -> float:
        """Seconds of training; rank 0's, so that all ranks decide alike."""
        elapsed = time.monotonic() - started
        if self.trainer.layout.world_size == 1:
            return elapsed
        shared = torch.tensor([elapsed], dtype=torch.float64, device=self.device)
        torch.distributed.broadcast(shared, 0)
        return float(shared.item())

    def _report(self, elapsed: float, span_s: float, num_steps: int, rate: float) -> None:
        """Print and keep speed and loss by kind of the last `span_s`, and the share of it spent waiting for screens."""
        count = self._count.cpu().numpy().copy()
        losses = -self._logp_sum.cpu().numpy() / np.maximum(count, 1)
        self._logp_sum.zero_()
        self._count.zero_()
        mean = float((losses * count).sum() / max(count.sum(), 1))
        by_kind = {
            name: round(float(x), 3) for name, x, n in zip(KIND_NAMES, losses, count, strict=True) if n
        }
        speed, waiting = num_steps * self.config.batch_screens / span_s, self._waited_s / span_s
        self._waited_s = 0.0
        self._say(
            f"{elapsed:5.0f} s  step {self.step}  {speed:.0f} screens/s  waiting {waiting:.0%}  lr {rate:.1e}  norm {self._grad_norm:.2f}"
            f"  loss {mean:.3f}  "
            + " ".join(f"{name.removeprefix('point_')} {x:.2f}" for name, x in by_kind.items())
        )
        self._keep(
            {
                "elapsed_s": elapsed,
                "screens_per_s": speed,
                "waiting": waiting,
                "loss": mean,
                "lr": rate,
                **by_kind,
            }
        )

    def _check(self, elapsed: float) -> None:
        """Print and keep held-out hit rates; enter the next stage when this one's are reached."""
        with megatron_patches.cpu_scope():
            rates = {short: test.hit_rate(self.trainer.model) for short, test in self._held_out.items()}
        self._say(f"{elapsed:5.0f} s  hit rate  " + "  ".join(f"{name} {x:.2f}" for name, x in rates.items()))
        self._keep({"elapsed_s": elapsed, **{f"hit_{name}": x for name, x in rates.items()}})
        wanted = self.config.stages[self.stage].leave_when
        if wanted and all(rates[name] >= rate for name, rate in wanted.items()):
            self.stage = min(self.stage + 1, len(self.config.stages) - 1)
            self._say(f"{elapsed:5.0f} s  stage {self.stage + 1} of {len(self.config.stages)}")

    def _save(self, elapsed: float) -> None:
        """A checkpoint to resume from, and the weights as run_dir/hf_latest."""
        progress = self.run_dir / "progress.json"
        if self.is_chief:
            known = json.loads(progress.read_text()) if progress.is_file() else {}
            write_atomic(
                progress,
                json.dumps({**known, str(self.step): {"spent_s": elapsed, "stage": self.stage}}).encode(),
            )
        self.trainer.save(self.run_dir / "checkpoints", self.step)
        self.trainer.export_hf(self.run_dir / "hf_latest", dtype="bf16")
        self._say(f"{elapsed:5.0f} s  saved step {self.step}")

    def _keep(self, row: dict[str, Any]) -> None:
        if self.is_chief:
            with (self.run_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": self.step, **row}) + "\n")

    def _say(self, line: str) -> None:
        if self.is_chief:
            print(line, flush=True)
