"""Training samples to packed micro-batches: under a token budget, balanced over data-parallel ranks by predicted cost.

Legend: T packed tokens (images expanded), S segments, K action steps of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from slime_cua.core.errors import DataError
from slime_cua.core.routing import UNKNOWN
from slime_cua.core.types import NOT_SAMPLED, TrainSample
from slime_cua.data.batch import STEP_TYPES, PackedBatch, PackedStep, empty_batch
from slime_cua.data.expand import ImageProcessorConfig, expand_image_placeholders, num_image_tokens


@dataclass(frozen=True)
class CostModel:
    """Predicted work of a segment, in units of one token through the linear layers (projections, MLP, gated delta net).

    The defaults are about those of a 27B decoder with one full-attention layer in four; the trainer makes its own from its
    model (slime_cua.trainer.flops.cost_model).
    """

    per_token: float = 1.0
    per_token_pair: float = 6e-6
    """Full attention; pairs are T^2 / 2 counted as T^2."""
    per_image_token: float = 0.1
    """Vision tower, by tokens after merging."""
    per_trained_token: float = 0.05
    """Language-model head, three matrix products."""

    def cost(self, num_tokens: int, num_image_tokens: int, num_trained: int) -> float:
        return (
            self.per_token * num_tokens
            + self.per_token_pair * num_tokens**2
            + self.per_image_token * num_image_tokens
            + self.per_trained_token * num_trained
        )


def pack(
    samples: Sequence[TrainSample],
    *,
    max_tokens: int,
    num_dp: int,
    images: ImageProcessorConfig,
    cost_model: CostModel | None = None,
    pad_multiple: int = 1,
    segment_multiple: int = 1,
    pad_id: int = 0,
    is_zero_skipped: bool = False,
    on_refused: Literal["raise", "drop"] = "raise",
) -> PackedStep:
    """`samples` of one optimiser step as micro-batches of at most `max_tokens` tokens, padding included.

    num_dp: data-parallel ranks; each gets the same number of micro-batches, empty ones where there is too little work.
    images: how many tokens an image becomes. cost_model: what is balanced.
    pad_multiple: T is rounded up to a multiple of it by a padding sequence (sequence parallelism needs one of TP).
        Empty batches then hold that many padding tokens. It is a multiple of segment_multiple.
    segment_multiple: each segment gets untrained tokens at its end up to a multiple of it (context parallelism cuts each into
        2 CP chunks of one length); nothing before them sees them.
    is_zero_skipped: samples with advantage 0 are not computed; they still count in num_samples and num_tokens, so loss
        and gradient are the same (without KL and entropy terms).
    on_refused: a sample over the budget, without trained tokens or with wrong images raises DataError by name, or is
        left out of everything and listed in `refused`.
    Samples of weight 0 are left out. The result depends on the samples only, not on their order (equal costs: by name).
    """
    budget = max_tokens // pad_multiple * pad_multiple
    if budget < 1:
        raise ValueError(f"max_tokens {max_tokens} must be at least pad_multiple {pad_multiple}")
    model = cost_model or CostModel()
    items: list[_Item] = []
    refused: list[str] = []
    for sample in sorted(samples, key=lambda sample: sample.segment.segment_id):
        if sample.sample_weight == 0:
            continue
        try:
            items.append(_padded(_expand(sample, images, model, budget), segment_multiple, pad_id))
        except DataError as error:
            if on_refused == "raise":
                raise
            refused.append(str(error))
    computed = [item for item in items if item.sample.advantage != 0] if is_zero_skipped else items
    bins = assign_bins([(item.num_tokens, item.cost) for item in computed], budget, num_dp)
    ranks = _spread([[computed[i] for i in indices] for indices in bins], num_dp)
    micro_batches = tuple(tuple(_build(group, pad_multiple, pad_id) for group in groups) for groups in ranks)
    all_tokens = sum(batch.num_tokens for rank in micro_batches for batch in rank)
    padding = sum(batch.num_padding for rank in micro_batches for batch in rank)
    return PackedStep(
        micro_batches=micro_batches,
        num_samples=float(np.sum([item.sample.sample_weight for item in items])),
        num_tokens=sum(item.num_trained for item in items),
        num_segments=len(items),
        cost_by_rank=tuple(sum(item.cost for group in groups for item in group) for groups in ranks),
        padding_share=padding / all_tokens if all_tokens else 0.0,
        refused=tuple(refused),
    )


def assign_bins(sizes_costs: Sequence[tuple[int, float]], budget: int, num_dp: int) -> list[list[int]]:
    """Indices by bin; the number of bins is the least multiple of num_dp (at least one each) that first-fit-decreasing needs.

    Within that number, items go, costliest first, to the cheapest bin with room; where that leaves one without
    room, the first-fit bins stand.
    """
    by_size = sorted(range(len(sizes_costs)), key=lambda i: (-sizes_costs[i][0], i))
    tight: list[list[int]] = []
    room: list[int] = []
    for i in by_size:
        size = sizes_costs[i][0]
        spot = next((b for b, free in enumerate(room) if free >= size), len(tight))
        if spot == len(tight):
            tight.append([])
            room.append(budget)
        tight[spot].append(i)
        room[spot] -= size
    num_bins = max(1, -(-len(tight) // num_dp)) * num_dp
    return _level(sizes_costs, budget, num_bins) or tight + [[] for _ in range(num_bins - len(tight))]


def _level(sizes_costs: Sequence[tuple[int, float]], budget: int, num_bins: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [budget] * num_bins
    cost = [0.0] * num_bins
    for i in sorted(range(len(sizes_costs)), key=lambda i: (-sizes_costs[i][1], i)):
        fitting = [b for b in range(num_bins) if room[b] >= sizes_costs[i][0]]
        if not fitting:
            return None
        spot = min(fitting, key=lambda b: (cost[b], b))
        bins[spot].append(i)
        room[spot] -= sizes_costs[i][0]
        cost[spot] += sizes_costs[i][1]
    return bins


def _spread(groups: list[list[_Item]], num_dp: int) -> list[list[list[_Item]]]:
    """Bins over ranks: the same number each, costliest first to the rank with the least cost so far."""
    per_rank = len(groups) // num_dp
    ranks: list[list[list[_Item]]] = [[] for _ in range(num_dp)]
    cost = [0.0] * num_dp
    for group in sorted(groups, key=lambda group: -sum(item.cost for item in group)):
        spot = min((r for r in range(num_dp) if len(ranks[r]) < per_rank), key=lambda r: (cost[r], r))
        ranks[spot].append(group)
        cost[spot] += sum(item.cost for item in group)
    return ranks


@dataclass(frozen=True)
class _Item:
    """A sample with its streams expanded and shifted onto the rows that predict them."""

    sample: TrainSample
    input_ids_T: np.ndarray
    target_T: np.ndarray
    is_trained_T: np.ndarray
    old_logp_T: np.ndarray
    version_T: np.ndarray
    step_T: np.ndarray
    sees_image_T: np.ndarray
    cost: float
    num_padding: int = 0
    """Of its tokens, those at its end that were added."""

    @property
    def routed_shape(self) -> tuple[int, int] | None:
        """(layers, experts a token) of what the engine recorded."""
        routed = self.sample.segment.routed_experts
        return None if routed is None else (routed.num_layers, routed.top_k)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)

    @property
    def num_trained(self) -> int:
        return int(self.is_trained_T.sum())


def _expand(sample: TrainSample, images: ImageProcessorConfig, model: CostModel, budget: int) -> _Item:
    segment = sample.segment
    try:
        ids_T = np.asarray(
            expand_image_placeholders(segment.token_ids, segment.images, images), dtype=np.int64
        )
    except DataError as error:
        raise DataError(f"segment {segment.segment_id}: {error}") from error
    if len(ids_T) > budget:
        raise DataError(
            f"segment {segment.segment_id} has {len(ids_T)} tokens with images expanded, the budget is {budget}: raise "
            "trainer.max_tokens_per_rank or keep fewer screenshots"
        )
    repeats = np.ones(len(segment.token_ids), dtype=np.int64)
    is_image = np.asarray(segment.token_ids, dtype=np.int64) == images.image_token_id
    repeats[is_image] = [num_image_tokens(image, images) for image in segment.images]
    trained_T = np.repeat(np.asarray(segment.is_trained, dtype=bool), repeats)
    _check(sample, trained_T, is_image)
    step_T = _ahead(np.repeat(np.asarray(segment.step_of_token, dtype=np.int64), repeats), NOT_SAMPLED)
    logp_T = _ahead(np.repeat(np.asarray(segment.logp, dtype=np.float32), repeats), 0.0)
    version_T = _ahead(np.repeat(np.asarray(segment.versions, dtype=np.int32), repeats), NOT_SAMPLED)
    rows_T = _ahead(trained_T, False)
    return _Item(
        sample=sample,
        input_ids_T=ids_T,
        target_T=_ahead(ids_T, -1),
        is_trained_T=rows_T,
        old_logp_T=np.where(rows_T, logp_T, np.float32(0.0)),
        version_T=np.where(rows_T, version_T, np.int32(NOT_SAMPLED)),
        step_T=np.where(rows_T, step_T, NOT_SAMPLED),
        sees_image_T=np.cumsum(np.repeat(is_image, repeats)) > 0,
        cost=model.cost(len(ids_T), int(repeats[is_image].sum()), int(trained_T.sum())),
    )


def _padded(item: _Item, multiple: int, pad_id: int) -> _Item:
    """The item with tokens of a padding sequence at its end."""
    num = -item.num_tokens % multiple
    if not num:
        return item
    pads = empty_batch(num, pad_id)
    names = ("input_ids_T", "target_T", "is_trained_T", "old_logp_T", "version_T", "sees_image_T")
    streams: dict[str, Any] = {
        name: np.concatenate([getattr(item, name), getattr(pads, name)]) for name in names
    }
    step_T = np.concatenate([item.step_T, np.full(num, NOT_SAMPLED, dtype=item.step_T.dtype)])
    return replace(item, **streams, step_T=step_T, num_padding=num)


def _check(sample: TrainSample, trained_T: np.ndarray, is_image: np.ndarray) -> None:
    segment = sample.segment
    trained = np.asarray(segment.is_trained, dtype=bool)
    steps = np.asarray(segment.step_of_token)[trained]
    if not trained_T.any():
        raise DataError(f"segment {segment.segment_id} has no trained token")
    if trained_T[0]:
        raise DataError(
            f"segment {segment.segment_id} trains its first token, which nothing predicts: it needs context before it"
        )
    if (trained & is_image).any():
        raise DataError(
            f"segment {segment.segment_id} trains an image placeholder: the policy sampled its id; forbid it in sampling"
        )
    if steps.min() < 0 or steps.max() >= len(segment.step_types):
        raise DataError(
            f"segment {segment.segment_id} has steps {steps.min()}..{steps.max()} for {len(segment.step_types)} step types"
        )
    if not np.isfinite(np.asarray(segment.logp)[trained]).all():
        raise DataError(
            f"segment {segment.segment_id} has a log-prob that is NaN or infinite at a trained token"
        )
    if not (np.isfinite(sample.advantage) and np.isfinite(sample.sample_weight) and sample.sample_weight > 0):
        raise DataError(
            f"segment {segment.segment_id}: advantage {sample.advantage} and sample_weight {sample.sample_weight} must be "
            "finite and the weight positive"
        )


def _ahead(values_T: np.ndarray, last: float) -> np.ndarray:
    """values_T moved one row up: row t holds what belongs to token t + 1."""
    return np.concatenate([values_T[1:], np.asarray([last], dtype=values_T.dtype)])


def _build(items: list[_Item], pad_multiple: int, pad_id: int) -> PackedBatch:
    if not items:
        return empty_batch(pad_multiple, pad_id)
    items = sorted(items, key=lambda item: item.sample.segment.segment_id)
    lengths = [item.num_tokens for item in items]
    num_padding = -sum(lengths) % pad_multiple
    padding = empty_batch(num_padding, pad_id)
    segments = [item.sample.segment for item in items]
    first_step = np.cumsum([0] + [len(segment.step_types) for segment in segments])
    steps = [
        np.where(item.is_trained_T, item.step_T + start, NOT_SAMPLED)
        for item, start in zip(items, first_step, strict=False)
    ]
    ends = np.cumsum([0, *lengths] + ([num_padding] if num_padding else []))
    refs = tuple(ref for segment in segments for ref in segment.images)
    distinct = tuple(dict.fromkeys(refs))
    place = {ref: i for i, ref in enumerate(distinct)}
    types = [STEP_TYPES.index(step_type) for segment in segments for step_type in segment.step_types]
    return PackedBatch(
        input_ids_T=np.concatenate([*(item.input_ids_T for item in items), padding.input_ids_T]),
        target_T=np.concatenate([*(item.target_T for item in items), padding.target_T]),
        is_trained_T=np.concatenate([*(item.is_trained_T for item in items), padding.is_trained_T]),
        old_logp_T=np.concatenate([*(item.old_logp_T for item in items), padding.old_logp_T]),
        version_T=np.concatenate([*(item.version_T for item in items), padding.version_T]),
        segment_id_T=np.repeat(np.arange(len(items) + 1), [*lengths, num_padding]),
        step_id_T=np.concatenate([*steps, padding.step_id_T]),
        sees_image_T=np.concatenate([*(item.sees_image_T for item in items), padding.sees_image_T]),
        step_type_K=np.asarray(types, dtype=np.int64),
        advantage_S=np.asarray([item.sample.advantage for item in items], dtype=np.float32),
        sample_weight_S=np.asarray([item.sample.sample_weight for item in items], dtype=np.float32),
        cu_seqlens=ends.astype(np.int32),
        images_I=refs,
        distinct_images=distinct,
        image_index_I=np.asarray([place[ref] for ref in refs], dtype=np.int64),
        segment_names=tuple(segment.segment_id for segment in segments),
        num_padding=num_padding + sum(item.num_padding for item in items),
        routed_TLK=_routed(items, sum(lengths) + num_padding),
    )


def _routed(items: list[_Item], num_tokens: int) -> np.ndarray | None:
    """Recorded experts of the packed stream; UNKNOWN after each record's end and for segments without one."""
    shapes = {item.routed_shape for item in items} - {None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise DataError(
            f"segments of models of different shape in one batch: (layers, experts a token) {sorted(shapes, key=str)}"
        )
    whole = np.full((num_tokens, *shapes.pop()), UNKNOWN, dtype=np.int16)  # type: ignore[misc]
    at = 0
    for item in items:
        routed = item.sample.segment.routed_experts
        if routed is not None:
            if routed.num_tokens > item.num_tokens:
                raise DataError(
                    f"segment {item.sample.segment.segment_id} has {routed.num_tokens} recorded routings for "
                    f"{item.num_tokens} tokens"
                )
            whole[at : at + routed.num_tokens] = routed.to_array()
        at += item.num_tokens
    return whole
