"""What a trainer rank gets: one packed micro-batch, and all micro-batches of an optimiser step. Numpy only.

Legend: T packed tokens (images expanded), S segments, K action steps of the micro-batch, I images in stream order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slime_cua.core.types import NOT_SAMPLED, ImageRef, StepType

STEP_TYPES: tuple[StepType, ...] = ("gui", "code", "mcp", "skill", "terminate", "format_error")
"""Order of `step_type_K` and of every statistic by action type."""


@dataclass(frozen=True)
class PackedBatch:
    """Whole segments, one after the other, without padding between them.

    Row t of every [T] array belongs to the logits at position t, which predict the token at t + 1 of the same segment:
    the head runs on rows `is_trained_T`, and their targets, old log-probs and steps are at the same index.

    Example (one segment, ids 7 8 9 5, the last two trained by steps 0 and 1):
        input_ids_T = [7 8 9 5]   target_T = [8 9 5 -1]   is_trained_T = [0 1 1 0]   step_id_T = [-1 0 1 -1]
    """

    input_ids_T: np.ndarray
    """int64."""
    target_T: np.ndarray
    """int64; the next token of the segment, -1 at its last row."""
    is_trained_T: np.ndarray
    """bool; row t predicts a trained token."""
    old_logp_T: np.ndarray
    """float32; the engine's log-prob of the target where trained, else 0."""
    version_T: np.ndarray
    """int32; policy_version that sampled the target where trained, else -1."""
    segment_id_T: np.ndarray
    """int64; 0..S-1, and S for padding rows."""
    step_id_T: np.ndarray
    """int64; 0..K-1 numbered over the micro-batch where trained, else -1."""
    sees_image_T: np.ndarray
    """bool; an image stands in the segment up to row t: what row t predicts is conditioned on it."""
    step_type_K: np.ndarray
    """int64; index into STEP_TYPES."""
    advantage_S: np.ndarray
    """float32."""
    sample_weight_S: np.ndarray
    """float32."""
    cu_seqlens: np.ndarray
    """int32 [S + 1], or [S + 2] when padding follows as a sequence of its own: start of each sequence, then T."""
    images_I: tuple[ImageRef, ...]
    """Images of the placeholders in input_ids_T, in order."""
    distinct_images: tuple[ImageRef, ...]
    """Each content once, by first appearance."""
    image_index_I: np.ndarray
    """int64; images_I[i] is distinct_images[image_index_I[i]]."""
    segment_names: tuple[str, ...]
    num_padding: int = 0
    routed_TLK: np.ndarray | None = None
    """int16 [T, layers, experts a token]; what the engine's routers chose, -1 where unknown. None: nothing is known."""

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return len(self.input_ids_T)

    @property
    def num_segments(self) -> int:
        return len(self.segment_names)

    @property
    def num_trained(self) -> int:
        """Rows that go through the head."""
        return int(self.is_trained_T.sum())

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence; 0 for an empty batch."""
        return int(np.diff(self.cu_seqlens).max(initial=0))

    @property
    def position_in_segment_T(self) -> np.ndarray:
        """int64; counted from 0 in each sequence."""
        lengths = np.diff(self.cu_seqlens)
        return np.arange(self.num_tokens) - np.repeat(self.cu_seqlens[:-1], lengths)

    def step_weights(self, weight_of_type: dict[str, float]) -> np.ndarray:
        """float32 [K]: alpha of each step. A type without an entry raises KeyError."""
        table = np.array([weight_of_type[name] for name in STEP_TYPES], dtype=np.float32)
        return table[self.step_type_K]


@dataclass(frozen=True)
class PackedStep:
    """All micro-batches of one optimiser step: the same number on each data-parallel rank; some may be empty."""

    micro_batches: tuple[tuple[PackedBatch, ...], ...]
    """[data-parallel rank][micro-batch]."""
    num_samples: float
    """Sum of sample weights over all ranks: the denominator of sample means."""
    num_tokens: int
    """Trained tokens over all ranks: the denominator of token means."""
    num_segments: int
    cost_by_rank: tuple[float, ...]
    """Predicted work, arbitrary unit."""
    padding_share: float
    """Padding tokens / all tokens."""
    refused: tuple[str, ...] = ()
    """Why samples were left out, one line each."""


def oldest_version(batch: PackedBatch) -> int | None:
    """The oldest policy_version among trained tokens; None if nothing is trained."""
    versions = batch.version_T[batch.is_trained_T]
    return int(versions.min()) if len(versions) else None


def empty_batch(num_padding: int = 0, pad_id: int = 0) -> PackedBatch:
    """No segment; `num_padding` padding tokens, so that a forward pass has something to run on."""
    integers = np.full(num_padding, -1, dtype=np.int64)
    return PackedBatch(
        input_ids_T=np.full(num_padding, pad_id, dtype=np.int64),
        target_T=integers,
        is_trained_T=np.zeros(num_padding, dtype=bool),
        old_logp_T=np.zeros(num_padding, dtype=np.float32),
        version_T=np.full(num_padding, NOT_SAMPLED, dtype=np.int32),
        segment_id_T=np.zeros(num_padding, dtype=np.int64),
        step_id_T=integers.copy(),
        sees_image_T=np.zeros(num_padding, dtype=bool),
        step_type_K=np.zeros(0, dtype=np.int64),
        advantage_S=np.zeros(0, dtype=np.float32),
        sample_weight_S=np.zeros(0, dtype=np.float32),
        cu_seqlens=np.array([0, num_padding] if num_padding else [0], dtype=np.int32),
        images_I=(),
        distinct_images=(),
        image_index_I=np.zeros(0, dtype=np.int64),
        segment_names=(),
        num_padding=num_padding,
    )
