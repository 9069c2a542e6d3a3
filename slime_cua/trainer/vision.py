"""The vision tower's work: each distinct image once, split over tensor-parallel ranks, and remembered while it is frozen.

The bridge calls the tower on every rank with everything; this takes the place of the tower's forward.
Legend: M image tokens, H width of the language model, P patches.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from slime_cua.trainer.batch import Microbatch
from slime_cua.trainer.vision_speed import speed_up_tower


class VisionTower:
    """Runs a transformers vision tower for one micro-batch at a time.

    max_bytes: features of a frozen tower kept from one micro-batch to the next, least recently used dropped first.
    """

    def __init__(self, tower: Any, tp_group: Any, is_frozen: bool, max_bytes: int) -> None:
        self._positions = speed_up_tower(tower)
        if self._positions is not None:
            self._positions.handle.remove()  # the hook sees all images, a rank computes some
        self._run = tower.forward
        tower.forward = self._forward
        self._merge = int(tower.config.spatial_merge_size) ** 2
        self._width = int(tower.config.out_hidden_size)
        self._num_outputs = 1 + len(getattr(tower.config, "deepstack_visual_indexes", None) or [])
        self._parameter = next(tower.parameters())
        self._group = tp_group
        self._max_bytes = max_bytes if is_frozen else 0
        self._known: OrderedDict[str, list[torch.Tensor]] = OrderedDict()
        self._num_bytes = 0
        self.batch: Microbatch | None = None
        """The micro-batch that is running; set around the model's forward."""

    def is_known(self, name: str) -> bool:
        """Whether the features of an image are remembered, so that its pixels need not be read."""
        return name in self._known

    def forget(self) -> None:
        """Drop all features: the weights changed."""
        self._known.clear()
        self._num_bytes = 0

    def _forward(self, patches: torch.Tensor, grid_thw: torch.Tensor, **ignored: Any) -> SimpleNamespace:
        """In place of the tower's forward: features of every image token of the stream, in order."""
        batch = self.batch
        assert batch is not None
        if batch.patches is None:
            outputs = self._empty(
                1
            )  # text only: the bridge shows a dummy image and multiplies its features by 0
        else:
            outputs = self._split(batch.patches, grid_thw, batch.patch_counts)
            if batch.image_names:
                outputs = self._assemble(outputs, batch)
            if batch.image_token_M is not None:
                outputs = [x.index_select(0, batch.image_token_M) for x in outputs]
        return SimpleNamespace(pooler_output=outputs[0], deepstack_features=outputs[1:])

    def _empty(self, num_tokens: int) -> list[torch.Tensor]:
        return [self._parameter.new_zeros(num_tokens, self._width) for _ in range(self._num_outputs)]

    def _features(self, patches: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        if not len(grid_thw):
            return self._empty(0)
        positions = {} if self._positions is None else self._positions.of(grid_thw)
        result = self._run(patches.to(self._parameter.dtype), grid_thw=grid_thw, **positions)
        return [result.pooler_output, *(getattr(result, "deepstack_features", None) or [])]

    def _split(
        self, patches: torch.Tensor, grid_thw: torch.Tensor, counts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Features of all images, each computed by one rank."""
        if self._group is None or not counts:
            return self._features(patches, grid_thw)
        bounds = split_evenly(counts, dist.get_world_size(self._group))
        rank = dist.get_rank(self._group)
        first, last = bounds[rank], bounds[rank + 1]
        ends = [0, *itertools.accumulate(counts)]
        mine = self._features(patches[ends[first] : ends[last]], grid_thw[first:last])
        start, total = ends[first] // self._merge, ends[-1] // self._merge
        return [_Gather.apply(x, start, total, self._group) for x in mine]

    def _assemble(self, fresh: list[torch.Tensor], batch: Microbatch) -> list[torch.Tensor]:
        """Features of the distinct images in order, from memory and from this run."""
        sizes = [count // self._merge for count in batch.patch_counts]
        new = [name for name in batch.image_names if name not in self._known]
        pieces = dict(zip(new, zip(*(x.split(sizes) for x in fresh), strict=True), strict=True))
        found = [pieces.get(name) or self._known[name] for name in batch.image_names]
        if self._max_bytes:
            self._remember(batch.image_names, {name: list(x) for name, x in pieces.items()})
        return [torch.cat([features[i] for features in found]) for i in range(self._num_outputs)]

    def _remember(self, names: Sequence[str], pieces: dict[str, list[torch.Tensor]]) -> None:
        for name in names:
            if name in pieces:
                self._known[name] = [x.detach().clone() for x in pieces[name]]
                self._num_bytes += _size(self._known[name])
            self._known.move_to_end(name)
        while self._num_bytes > self._max_bytes:
            _, dropped = self._known.popitem(last=False)
            self._num_bytes -= _size(dropped)


def split_evenly(counts: Sequence[int], num_ranks: int) -> list[int]:
    """Bounds of contiguous ranges of images, one a rank, of about equal sums.

    Example: counts 4 1 1 1 1 over 2 ranks: [0, 1, 5].
    """
    total = sum(counts)
    middles = [end - count / 2 for count, end in zip(counts, itertools.accumulate(counts), strict=True)]
    return [sum(middle < total * rank / num_ranks for middle in middles) for rank in range(num_ranks)] + [
        len(counts)
    ]


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


class _Gather(torch.autograd.Function):
    """Rows of all ranks from each rank's own.

    Every rank gets the gradient of all rows and keeps its own, times the number of ranks: Megatron averages the gradients of a
    Hugging Face tower over the tensor-parallel ranks, and the average of N times the parts is their sum.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, start: int, total: int, group: Any) -> torch.Tensor:
        ctx.span = (start, start + len(own), dist.get_world_size(group))
        whole = own.new_zeros(total, own.shape[1])
        whole[start : start + len(own)] = own
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        start, end, num_ranks = ctx.span
        return grads[0][start:end] * num_ranks, None, None, None
