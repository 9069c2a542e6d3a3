"""Supervised training on a stream of batches whose images are already decoded: pretraining a tiny base on one GPU.

The same model, optimiser and loss as TrainerRank. All samples of a step are padded to one length and their images stacked,
so a step has no loop over samples on the device: one batched attention, one patchify, one vision pass.
Legend: N source tokens over all samples, S samples, L expanded tokens of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import megatron_patches
from slime_cua.config.trainer import TrainerConfig
from slime_cua.core.errors import DataError
from slime_cua.trainer.batch import Microbatch
from slime_cua.trainer.images import PatchConfig, patchify
from slime_cua.trainer.prefetch import prefetch
from slime_cua.trainer.rank import TrainerRank
from slime_cua.trainer.streams import expand_streams

LENGTH_MULTIPLE = 8


@dataclass(frozen=True)
class SupervisedSample:
    """One sample: ids with one placeholder an image, what is trained, and the decoded images."""

    token_ids: Sequence[int] | NDArray[np.int64]
    is_trained: Sequence[bool] | NDArray[np.bool_]
    images: Sequence[Any] = ()
    """uint8 [height, width, 3] arrays or PIL images, in the order of the placeholders; sides multiples of patch * merge."""


class SupervisedTrainer:
    """Next-token training. Example:

    trainer = SupervisedTrainer("models/random", config)
    for batch in batches:              # lists of SupervisedSample or (ids, is_trained, images) tuples
        loss = trainer.step(batch)
    trainer.export_hf("models/base")
    """

    def __init__(
        self,
        hf_dir: Path | str,
        config: TrainerConfig,
        rank: int = 0,
        world_size: int = 1,
        master_addr: str = "127.0.0.1",
        master_port: int = 0,
        seed: int = 0,
    ) -> None:
        """Joins the job and loads `hf_dir`; arguments as of TrainerRank. master_port 0 with one rank: a free port."""
        self.rank = TrainerRank(config, rank, world_size, master_addr, master_port, seed)
        self.rank.load(hf_dir)
        self._patches = PatchConfig.from_hf(hf_dir)

    def step(self, batch: Sequence[Any]) -> float:
        """One optimiser step; the mean negative log-prob of the batch's trained tokens before it, in nats."""
        return self._step(self._prepare(batch))

    def run(self, batches: Iterable[Sequence[Any]]) -> Iterator[float]:
        """step() over a stream, the next batch drawn and prepared in a thread while the device works. Gives the losses."""
        for prepared in prefetch(self._prepare(batch) for batch in batches):
            yield self._step(prepared)

    def loss(self, batch: Sequence[Any]) -> float:
        """The same mean without a step."""
        with megatron_patches.cpu_scope(), torch.no_grad():
            self.rank.model.module.eval()
            return float(self._run(self._prepare(batch), with_backward=False))

    def export_hf(self, target: Path | str, dtype: str = "source") -> None:
        """Write a Hugging Face folder with the current weights; see TrainerRank.export_hf."""
        self.rank.export_hf(target, dtype)

    def close(self) -> None:
        """Leave the job."""
        self.rank.close()

    def _step(self, prepared: tuple[list[Microbatch], int]) -> float:
        optimizer = self.rank.optimizer
        with megatron_patches.cpu_scope():
            self.rank.model.module.train()
            optimizer.zero_grad()
            loss = self._run(prepared, with_backward=True)
            optimizer.reduce_gradients()
            self.last_step = optimizer.step()
            return float(loss)

    def _prepare(self, batch: Sequence[Any]) -> tuple[list[Microbatch], int]:
        """This rank's micro-batches on its device, and the trained tokens of the whole batch."""
        samples = [s if isinstance(s, SupervisedSample) else SupervisedSample(*s) for s in batch]
        layout, budget = self.rank.layout, self.rank.config.max_tokens_per_rank
        num_tokens = sum(int(np.sum(s.is_trained)) for s in samples)
        return list(self._packs(samples[layout.dp_rank :: layout.dp_size], budget)), num_tokens

    def _run(self, prepared: tuple[list[Microbatch], int], with_backward: bool) -> torch.Tensor:
        packs, num_tokens = prepared
        layout = self.rank.layout
        total = torch.zeros((), device=layout.device)
        for pack in packs:
            logp_R, _ = self.rank.model.logprobs(pack, 1.0)
            value = -logp_R.sum() / max(num_tokens, 1)
            if with_backward:
                value.backward()
            total += value.detach()
        if layout.dp_size > 1:
            from megatron.core import mpu

            torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group())
        return total

    def _packs(self, samples: list[SupervisedSample], budget: int) -> Iterator[Microbatch]:
        """Micro-batches of at most `budget` tokens, padding counted."""
        at = 0
        while at < len(samples):
            longest = max(self._length(s) for s in samples[at:])
            longest += -longest % LENGTH_MULTIPLE
            if longest > budget:
                raise DataError(f"a sample of {longest} tokens is over max_tokens_per_rank {budget}")
            num = max(1, budget // longest)
            yield build_equal_lengths(samples[at : at + num], longest, self._patches, self.rank.layout.device)
            at += num

    def _length(self, sample: SupervisedSample) -> int:
        grids = (self._patches.token_grid(*size_wh_px(image)) for image in sample.images)
        return len(sample.token_ids) + sum(rows * columns - 1 for rows, columns in grids)


def size_wh_px(image: Any) -> tuple[int, int]:
    """(width, height) of a PIL image or a [height, width, 3] array."""
    return (image.shape[1], image.shape[0]) if hasattr(image, "shape") else image.size


def build_equal_lengths(
    samples: Sequence[SupervisedSample], length: int, config: PatchConfig, device: torch.device
) -> Microbatch:
    """One micro-batch on `device`: every sample padded at its end (untrained) to `length` expanded tokens."""
    images = [np.asarray(image, dtype=np.uint8) for sample in samples for image in sample.images]
    grids = np.array([config.token_grid(*size_wh_px(image)) for image in images], dtype=np.int64).reshape(
        -1, 2
    )
    ids = [np.asarray(s.token_ids, dtype=np.int64) for s in samples]
    per_image = iter((grids[:, 0] * grids[:, 1] - 1).tolist())
    extra = [sum(next(per_image) for _ in s.images) for s in samples]
    pads = [length - len(x) - more for x, more in zip(ids, extra, strict=True)]
    ids_N = np.concatenate(
        [part for x, n in zip(ids, pads, strict=True) for part in (x, np.zeros(n, np.int64))]
    )
    trained_N = np.concatenate(
        [
            part
            for s, n in zip(samples, pads, strict=True)
            for part in (np.asarray(s.is_trained, dtype=bool), np.zeros(n, bool))
        ]
    )
    sizes_S = np.array([len(x) + n for x, n in zip(ids, pads, strict=True)], dtype=np.int64)
    streams = expand_streams(ids_N, sizes_S, grids, config.tokens.image_token_id)
    at_R = streams.start_N[trained_N]
    patch_grids = _patch_grids(images, config)

    def put(values: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    return Microbatch(
        token_ids_T=put(streams.token_ids_T),
        positions_3T=put(streams.positions_3T),
        cu_seqlens=torch.arange(0, (len(samples) + 1) * length, length, dtype=torch.int32, device=device),
        max_seqlen=length,
        row_R=put(at_R - 1),
        target_R=put(streams.token_ids_T[at_R]),
        patches=_patches(images, config, put) if images else None,
        grid_I3=put(patch_grids) if images else None,
        patch_counts=tuple(patch_grids.prod(axis=1).tolist()) if images else (),
    )


def _patches(images: list[NDArray[np.uint8]], config: PatchConfig, put: Any) -> torch.Tensor:
    """Patches made on the device from uint8 pixels; runs of one size are stacked."""
    patches, at = [], 0
    while at < len(images):
        end = at
        while end < len(images) and images[end].shape == images[at].shape:
            end += 1
        patches.append(patchify(put(np.stack(images[at:end])), config))
        at = end
    return torch.cat(patches) if len(patches) > 1 else patches[0]


def _patch_grids(images: list[NDArray[np.uint8]], config: PatchConfig) -> NDArray[np.int64]:
    return np.array([(1, *config.grid_hw(*size_wh_px(image))) for image in images], dtype=np.int64)
