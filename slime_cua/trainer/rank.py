"""One trainer rank: a plain class that a Ray actor, a spawned process or a script drives.

Every method is a collective: all ranks call it with the same arguments, and all return.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import megatron_patches
from slime_cua.config.algo import LossConfig
from slime_cua.config.trainer import TrainerConfig
from slime_cua.convert import check_hf_folder
from slime_cua.core.errors import CheckpointError, ConfigError
from slime_cua.core.ports import free_port
from slime_cua.core.types import TrainSample
from slime_cua.trainer import checkpoint, runtime
from slime_cua.trainer.batch import Microbatch, build_microbatch, check_samples, expanded_lengths
from slime_cua.trainer.images import ImageLoader, ImageSource, PatchConfig
from slime_cua.trainer.layouts import check_divisibility
from slime_cua.trainer.losses import LossInput, find_loss
from slime_cua.trainer.metrics import Totals, named_metrics
from slime_cua.trainer.model import PolicyModel
from slime_cua.trainer.optimizer import Optimizer
from slime_cua.trainer.plan import plan_microbatches

Samples = Sequence[TrainSample] | Path | str


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

    def load(self, hf_dir: Path | str) -> None:
        """Build the model from a Hugging Face folder and a fresh optimiser.

        Raises CheckpointError or ConfigError, before any memory is taken, for a folder that is not whole or a layout
        that the model does not allow.
        """
        with self._scope():
            self._tensors = check_hf_folder(hf_dir)
            check_divisibility(hf_dir, self.config.parallel)
            self._hf_dir = Path(hf_dir)
            self._patches = PatchConfig.from_hf(hf_dir)
            self._loader = ImageLoader(self._patches)
            self.model = PolicyModel(hf_dir, self.config)
            self.optimizer = Optimizer(self.model, self.config)

    def train_step(
        self,
        samples: Samples,
        image_store: ImageSource | None = None,
        loss: str = "gspo",
        section: LossConfig | None = None,
        num_samples: float | None = None,
        policy_version: int | None = None,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """One optimiser step over the whole batch; every rank is given the whole batch and takes its share.

        samples: or a pickle file of them. num_samples: the global count the loss divides by; None: the number of samples.
        temperature: the sampling temperature; logits are divided by it. An empty batch is legal: no step is taken.
        Gives means and counts over the batch, the same on every rank. Raises DataError naming an impossible sample.
        """
        with self._scope():
            started = time.monotonic()
            items = read_samples(samples)
            plan = self._plan(items)
            find_loss(loss)
            num_tokens = float(sum(sum(s.segment.is_trained) for s in items))
            count = float(len(items)) if num_samples is None else num_samples
            totals, step = Totals(), {}
            if num_tokens:
                self.model.module.train()
                self.optimizer.zero_grad()
                for batch in self._microbatches(items, plan, image_store):
                    logp_R, entropy_R = self.model.logprobs(batch, temperature, with_entropy=loss != "sft")
                    given = LossInput(logp_R, entropy_R, batch, count, num_tokens, section)
                    value, stats = find_loss(loss)(given)
                    value.backward()
                    totals.add(value, stats, given)
                self.optimizer.reduce_gradients()
                step = self.optimizer.step()
            totals.reduce(self.layout)
            metrics = named_metrics(totals.values, step, loss)
            if loss != "sft":
                metrics["loss/num_samples"] = float(len(items))
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
            for batch in self._microbatches(items, self._plan(items), image_store):
                logp_R, _ = self.model.logprobs(batch, temperature)
                logp, segments = logp_R.cpu(), batch.segment_R.cpu()
                for position, index in enumerate(batch.sample_index):
                    mine[index] = logp[segments == position].tolist()
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
            yield name, tensor.to(checkpoint.target_dtype(name, self._tensors, dtype)) if dtype else tensor

    def export_hf(self, target: Path | str, dtype: str = "source") -> None:
        """Write a Hugging Face folder with the current weights, tensor for tensor like the one loaded; atomic.

        dtype: "source" (each tensor as in the folder loaded; bit-equal when untrained), "fp32" or "bf16".
        """
        checkpoint.write_hf(
            self.named_hf_tensors(dtype), self._source_folder(), Path(target), self._tensors, self.layout
        )

    def save(self, folder: Path | str, step: int) -> Path:
        """Write weights, optimiser, schedule and RNG under folder/step_XXXXXXXX; a reader never sees it half-written."""
        with self._scope():
            return checkpoint.save(Path(folder), step, self.model, self.optimizer, self.layout)

    def restore(self, folder: Path | str) -> int:
        """Load what save wrote, also under another tensor- or data-parallel size; gives the step. Needs load() before."""
        with self._scope():
            return checkpoint.restore(Path(folder), self.model, self.optimizer, self.layout)

    def close(self) -> None:
        """Leave the job."""
        runtime.stop()

    def _plan(self, items: Sequence[TrainSample]) -> list[list[list[int]]]:
        lengths = expanded_lengths(items, self._patches)
        check_samples(items, lengths, self.config.max_tokens_per_rank)
        return plan_microbatches(lengths, self.config.max_tokens_per_rank, self.layout.dp_size)

    def _microbatches(
        self, items: Sequence[TrainSample], plan: list[list[list[int]]], source: ImageSource | None
    ) -> Iterator[Microbatch]:
        multiple = self.config.parallel.tp if self.config.parallel.sequence_parallel else 1
        for indices in plan[self.layout.dp_rank]:
            batch = build_microbatch(items, indices, source, self._loader, multiple, pad_id=0)
            yield batch.to(self.layout.device)

    def _source_folder(self) -> Path:
        if self._hf_dir is None:
            raise CheckpointError("no model is loaded: call load() first")
        return self._hf_dir

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        with megatron_patches.cpu_scope():
            yield


def read_samples(samples: Samples) -> Sequence[TrainSample]:
    """The samples themselves, or those pickled in a file."""
    if isinstance(samples, str | Path):
        with Path(samples).open("rb") as file:
            loaded: Sequence[TrainSample] = pickle.load(file)
        return loaded
    return samples
