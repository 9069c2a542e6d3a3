"""One trainer rank: a plain class that a Ray actor, a spawned process or a script drives.

Every method is a collective: all ranks call it with the same arguments, and all return.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import megatron_patches
from slime_cua.config.algo import LossConfig
from slime_cua.config.trainer import TrainerConfig
from slime_cua.convert import check_hf_folder, read_config
from slime_cua.core.errors import CheckpointError, ConfigError, DataError
from slime_cua.core.ports import free_port
from slime_cua.core.types import TrainSample
from slime_cua.data.batch import PackedBatch, PackedStep
from slime_cua.data.packing import pack
from slime_cua.trainer import checkpoint, progress, runtime
from slime_cua.trainer.batch import Microbatch, build_microbatch
from slime_cua.trainer.extra_forwards import ExtraForwards, ExtraLogprobs, check_reference, start_logprobs
from slime_cua.trainer.flops import cost_model
from slime_cua.trainer.images import DecodeAhead, ImageLoader, ImageSource, PatchConfig
from slime_cua.trainer.layouts import check_divisibility, num_experts
from slime_cua.trainer.lora import check_lora, check_saved
from slime_cua.trainer.losses import chosen_old_policy, default_section, find_loss, loss_inputs
from slime_cua.trainer.metrics import Totals, named_metrics
from slime_cua.trainer.model import PolicyModel
from slime_cua.trainer.optimizer import Optimizer
from slime_cua.trainer.pending_save import PendingSave, make_writers_group
from slime_cua.trainer.sizes import ModelShape

Samples = Sequence[TrainSample] | Path | str


@dataclass(frozen=True)
class _Plan:
    """What one optimiser step computes, the same on every rank."""

    loss: str
    settings: LossConfig
    num_samples: float
    temperature: float
    version: int | None
    starts: dict[str, Sequence[float]] | None


class TrainerRank:
    """Owns this rank's share of the model, its optimiser and its images.

    rank, world_size: of the trainer job. master_addr, master_port: where rank 0 listens. seed: of dropout and of anything
    random in Megatron; ranks of a tensor-parallel group differ from it as Megatron says.
    """

    def __init__(
        self,
        config: TrainerConfig,
        rank: int = 0,
        world_size: int = 1,
        master_addr: str = "127.0.0.1",
        master_port: int = 0,
        seed: int = 0,
    ) -> None:
        self.config = config
        if master_port == 0:
            if world_size > 1:
                raise ConfigError("several trainer ranks need one master_port that all know")
            master_port = free_port()
        self.layout = runtime.start(config, rank, world_size, master_addr, master_port, seed)
        self._source: ImageSource | None = None
        self._hf_dir: Path | None = None
        self._pending: PendingSave | None = None
        self._writers: Any = None

    def load(self, hf_dir: Path | str) -> None:
        """Build the model from a Hugging Face folder and a fresh optimiser.

        Raises CheckpointError or ConfigError, before any memory is taken, for a folder that is not whole or a layout
        that the model does not allow.
        """
        self.finish_save()
        with self._scope():
            check_divisibility(hf_dir, self.config.parallel)
            self._tensors = check_hf_folder(hf_dir)
            check_lora(self.config, num_experts(read_config(hf_dir)))
            reference = check_reference(self.config.reference_model, hf_dir)
            self._hf_dir = Path(hf_dir)
            self._patches = PatchConfig.from_hf(hf_dir)
            self._loader = ImageLoader(self._patches)
            shape = ModelShape.from_config(read_config(hf_dir))
            self._cost_model = cost_model(shape, self.config.freeze_vision)
            self.model = PolicyModel(hf_dir, self.config, self._tensors)
            self.optimizer = Optimizer(self.model, self.config)
            self.extra = ExtraForwards(self.model, self._hf_dir, reference)

    def train_step(
        self,
        samples: Samples,
        image_store: ImageSource | None = None,
        loss: str = "gspo",
        section: LossConfig | None = None,
        num_samples: float | None = None,
        policy_version: int | None = None,
        temperature: float = 1.0,
        max_policy_lag: int = 1,
        start_logp: Sequence[Sequence[float]] | None = None,
    ) -> dict[str, float]:
        """One optimiser step over the whole batch; every rank is given the whole batch and takes its share.

        samples: or a pickle file of them. num_samples: the global count the loss divides by; None: the number of samples.
        temperature: the sampling temperature; logits are divided by it. An empty batch is legal: no step is taken.
        policy_version: of the weights before this step. max_policy_lag: how many older versions pi_old = behaviour keeps.
        start_logp: for pi_old = proximal at a later step of a collection, what `logprobs(samples)` gave before its first
        step; at the first step the forward's own are the same, and None saves the extra forward.
        With a KL term the reference is the folder that `load` read, also after `restore`.
        Gives means and counts over the batch, the same on every rank. Raises DataError naming an impossible sample, on all ranks alike.
        """
        with self._scope():
            started = time.monotonic()
            find_loss(loss)
            settings = default_section(loss, section)
            is_plain = loss != "sft" and settings.kl is None and settings.entropy_coef == 0
            items = read_samples(samples)
            batch = self._pack(items, is_zero_skipped=is_plain)
            count = batch.num_samples if num_samples is None else num_samples
            totals, step = Totals(), {}
            packs = [packed for share in batch.micro_batches for packed in share]
            self.model.routing.begin_step(sum(packed.num_tokens for packed in packs))
            if any(packed.num_segments for packed in packs):
                self.model.module.train()
                self.optimizer.zero_grad()
                plan = _Plan(
                    loss, settings, count, temperature, policy_version, _by_segment(items, start_logp)
                )
                fault: DataError | None = None
                try:
                    self._accumulate(plan, batch, image_store, totals)
                except DataError as error:
                    fault = error
                runtime.raise_together(fault, self.layout)
                progress.mark("gradients")
                self.extra.keep_version(settings, policy_version, max_policy_lag)
                self.optimizer.reduce_gradients()
                step = self.optimizer.step()
                progress.mark("stepped")
            totals.reduce(self.layout, self.model.routing.sums())
            metrics = named_metrics(totals.values, step, loss, batch)
            metrics["time/train_s"] = time.monotonic() - started
            if policy_version is not None:
                metrics["loss/policy_version"] = float(policy_version)
            return metrics

    def logprobs(
        self, samples: Samples, image_store: ImageSource | None = None, temperature: float = 1.0
    ) -> list[list[float]]:
        """Log-probs of each sample's trained tokens under the current weights; every rank gets all of them."""
        with self._scope(), torch.no_grad():
            items = read_samples(samples)
            self.model.module.eval()
            mine: dict[int, list[float]] = {}
            named = [
                TrainSample(segment=s.segment.model_copy(update={"segment_id": f"{i:09d}"}))
                for i, s in enumerate(items)
            ]
            for packed, on_device in self._microbatches(self._pack(named), image_store):
                logp_R = self.model.logprobs(on_device, temperature)[0].cpu()
                segment_R = torch.from_numpy(packed.segment_id_T[packed.is_trained_T])
                for position, name in enumerate(packed.segment_names):
                    mine[int(name)] = logp_R[segment_R == position].tolist()
            found = runtime.gather_dicts(mine, self.layout)
            return [found[index] for index in range(len(items))]

    def named_hf_tensors(self, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor) of the current weights, on this rank's device; collective: iterate to the end.

        dtype: None keeps the training dtype; "source" the checkpoint's, tensor by tensor.
        """
        with self._scope():
            iterator = self.model.export()
        while True:
            with self._scope():
                pair = next(iterator, None)
            if pair is None:
                return
            name, tensor = pair
            progress.mark(f"tensor {name}")
            yield name, tensor.to(checkpoint.target_dtype(name, self._tensors, dtype)) if dtype else tensor

    def export_hf(self, target: Path | str, dtype: str = "source") -> None:
        """Write a Hugging Face folder with the current weights, tensor for tensor like the one loaded; atomic.

        dtype: "source" (each tensor as in the folder loaded; bit-equal when untrained), "fp32" or "bf16".
        """
        checkpoint.write_hf(
            self.named_hf_tensors(dtype), self._source_folder(), Path(target), self._tensors, self.layout
        )

    def save(self, folder: Path | str, step: int, keep: int | None = None, is_async: bool = False) -> Path:
        """Write weights, optimiser, schedule and RNG under folder/step_XXXXXXXX; a reader never sees it half-written.

        keep: afterwards the newest `keep` checkpoints stay, the best one and those being read. is_async: return once the state
        is copied to the host; it is whole when `finish_save` has returned, or the next save, restore, load or close.
        Raises CheckpointError on every rank when a rank cannot write; with is_async, the call that waits for it does.
        """
        self.finish_save()
        arguments = (Path(folder), step, self.model, self.optimizer, self.layout, keep, self.extra)
        with self._scope():
            if not is_async:
                return checkpoint.save(*arguments)
            self._writers = self._writers or make_writers_group(self.config.timeout_s)
            self._pending = checkpoint.save_later(*arguments, group=self._writers)
            return self._pending.path

    def finish_save(self) -> Path | None:
        """Wait for an asynchronous save; its folder, None when there was none. Raises CheckpointError when it failed."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.wait()

    def restore(self, folder: Path | str) -> int:
        """Load what save wrote, also under another tensor-, expert- or data-parallel size; gives the step. Needs load() before."""
        self.finish_save()
        check_saved(folder, self.config.lora)
        with self._scope():
            return checkpoint.restore(Path(folder), self.model, self.optimizer, self.layout, self.extra)

    def close(self) -> None:
        """Leave the job, a checkpoint that is being written first."""
        try:
            self.finish_save()
        finally:
            self._writers = None
            runtime.stop()

    def _pack(self, items: Sequence[TrainSample], is_zero_skipped: bool = False) -> PackedStep:
        parallel = self.config.parallel
        chunks = 2 * parallel.cp if parallel.cp > 1 else 1
        return pack(
            items,
            max_tokens=self.config.max_tokens_per_rank * parallel.cp,
            num_dp=self.layout.dp_size,
            images=self._patches.tokens,
            cost_model=self._cost_model,
            pad_multiple=chunks * (parallel.tp if parallel.sequence_parallel else 1),
            segment_multiple=chunks,
            is_zero_skipped=is_zero_skipped,
        )

    def _accumulate(self, plan: _Plan, batch: PackedStep, source: ImageSource | None, totals: Totals) -> None:
        """Forward and backward of this rank's micro-batches, into the gradient buffers and `totals`."""
        compute, settings = find_loss(plan.loss), plan.settings
        extras = self._extras(plan, batch, source)
        for (packed, on_device), extra in zip(self._microbatches(batch, source), extras, strict=False):
            logp_R, entropy_R = self.model.logprobs(
                on_device,
                plan.temperature,
                with_entropy=plan.loss != "sft",
                entropy_grad=settings.entropy_coef != 0,
            )
            inputs = loss_inputs(
                packed, logp_R, entropy_R, settings, plan.num_samples, float(batch.num_tokens), extra
            )
            if plan.loss == "sft":
                value, stats = compute(inputs, settings)
                value.backward()
                totals.add(value, stats, inputs, packed)
                continue
            lost_R = self.extra.is_lost(packed, plan.version)
            if plan.starts is not None:
                extra = replace(extra, start_R=start_logprobs(packed, plan.starts))
            inputs = chosen_old_policy(inputs, settings, extra, lost_R)
            value, stats = compute(inputs, settings)
            value.backward()
            num_lost = int(lost_R.sum()) if settings.pi_old == "behaviour" else 0
            totals.add(value, stats, inputs, packed, plan.version, num_lost)

    def _extras(self, plan: _Plan, batch: PackedStep, source: ImageSource | None) -> Iterable[ExtraLogprobs]:
        """For each of this rank's micro-batches; without forwards where the loss section needs none."""
        names = self.extra.needed(batch, plan.settings, plan.version)
        if not names:
            return itertools.repeat(ExtraLogprobs())
        return self.extra.run(names, lambda: self._microbatches(batch, source), plan.temperature)

    def _microbatches(
        self, batch: PackedStep, source: ImageSource | None
    ) -> Iterator[tuple[PackedBatch, Microbatch]]:
        """This rank's micro-batches. Empty ones only where experts are spread over ranks: all must then take part."""
        share = batch.micro_batches[self.layout.dp_rank]
        with DecodeAhead(self._loader, source, self._is_known) as ahead:
            for number, packed in enumerate(share, start=1):
                progress.mark(f"micro-batch {number} of {len(share)}")
                if not packed.num_segments and self.config.parallel.ep == 1:
                    continue
                ahead.wait()
                built = build_microbatch(packed, source, self._loader, self._is_known, self.layout.device)
                if number < len(share):
                    ahead.start(share[number].distinct_images)
                yield packed, built

    def _is_known(self, image: str) -> bool:
        return self.model.vision is not None and self.model.vision.is_known(image)

    def _source_folder(self) -> Path:
        if self._hf_dir is None:
            raise CheckpointError("no model is loaded: call load() first")
        return self._hf_dir

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        with megatron_patches.cpu_scope():
            yield


def _by_segment(
    items: Sequence[TrainSample], values: Sequence[Sequence[float]] | None
) -> dict[str, Sequence[float]] | None:
    if values is None:
        return None
    return {item.segment.segment_id: logp for item, logp in zip(items, values, strict=True)}


def read_samples(samples: Samples) -> Sequence[TrainSample]:
    """The samples themselves, or those pickled in a file."""
    if isinstance(samples, str | Path):
        with Path(samples).open("rb") as file:
            loaded: Sequence[TrainSample] = pickle.load(file)
        return loaded
    return samples
