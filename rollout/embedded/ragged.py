"""Attention over a ragged batch: tokens of many sequences in one flat row, each sequence with its own cached keys.

A step runs T tokens at once as a batch of one row. Everything but attention does not look across tokens, so it runs once
over all T. Attention runs a sequence at a time against that sequence's own buffer: no padding, nothing is copied.

Legend: T tokens of the step, L layers, K key-value heads, G query heads a key-value head, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ATTENTION_NAME = "slime_cua_ragged"
_GROW_TOKENS = 256


@dataclass(frozen=True)
class KvShape:
    """What one cached token takes."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    is_recurrent: bool = False
    """Some layers keep a running state instead: a sequence can be continued at its end, and nowhere else."""

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.dtype.itemsize


class KvBuffer:
    """Keys and values of one sequence. `length` tokens are valid in every layer."""

    def __init__(self, shape: KvShape, capacity: int) -> None:
        self.shape = shape
        self.length = 0
        self.states: dict[int, tuple[Tensor, Tensor]] = {}
        """Running states by decoder layer; only when `shape.is_recurrent`."""
        self.routed: list[np.ndarray] = []
        """Mixture of experts: chosen experts [tokens, layers, experts a token] of each step's tokens, in order."""
        self.keys = self._empty(capacity)
        self.values = self._empty(capacity)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more."""
        needed = self.length + num_tokens
        if needed <= self.capacity:
            return
        keys, values = self.keys, self.values
        capacity = needed + max(_GROW_TOKENS, needed // 4)
        self.keys, self.values = self._empty(capacity), self._empty(capacity)
        self.keys[:, :, : self.length] = keys[:, :, : self.length]
        self.values[:, :, : self.length] = values[:, :, : self.length]

    def copy_prefix(self, source: KvBuffer, num_tokens: int) -> None:
        """Become the first `num_tokens` of `source`."""
        assert num_tokens <= source.length and not self.shape.is_recurrent
        self.length = 0
        self.reserve(num_tokens)
        self.keys[:, :, :num_tokens] = source.keys[:, :, :num_tokens]
        self.values[:, :, :num_tokens] = source.values[:, :, :num_tokens]
        self.length = num_tokens
        if source.routed:
            self.routed = [np.concatenate(source.routed)[:num_tokens]]

    def _empty(self, capacity: int) -> Tensor:
        shape = self.shape
        size = (shape.num_layers, shape.num_heads, capacity, shape.head_dim)
        return torch.empty(size, dtype=shape.dtype, device=shape.device)


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + length) of the step belong to one sequence and follow what its buffer holds."""

    kv: KvBuffer
    start: int
    length: int


class RaggedBatch:
    """Handed through the model in the place of its cache; the attention below reads it."""

    def __init__(self, pieces: list[Piece], attention_layers: dict[int, int]) -> None:
        self.pieces = pieces
        self.attention_layers = attention_layers
        """Index of a decoder layer -> index in the buffers."""
        for piece in pieces:
            piece.kv.reserve(piece.length)
        self._masks: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any
    ) -> tuple[Tensor, Tensor]:
        """The cache interface of transformers: nothing is joined here, attention stores what is new."""
        return key_states, value_states

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of the T query tokens, each over its own sequence.

        query (1, K*G, T, D), key and value (1, K, T, D); returns (1, T, K*G, D).
        """
        index = self.attention_layers[layer]
        num_heads, head_dim = query.shape[1], query.shape[3]
        num_kv_heads = key.shape[1]
        output = torch.empty((query.shape[2], num_heads, head_dim), dtype=query.dtype, device=query.device)
        for piece in self.pieces:
            start, count, past = piece.start, piece.length, piece.kv.length
            end, total = start + count, past + count
            keys, values = piece.kv.keys[index], piece.kv.values[index]
            keys[:, past:total] = key[0, :, start:end]
            values[:, past:total] = value[0, :, start:end]
            attended = _attend_one(
                query[0, :, start:end].reshape(num_kv_heads, -1, head_dim),
                keys[:, :total],
                values[:, :total],
                count,
                self._mask(piece, num_heads // num_kv_heads),
                scaling,
            )
            output[start:end] = attended.view(num_heads, count, head_dim).transpose(0, 1)
        return output.unsqueeze(0)

    def _mask(self, piece: Piece, num_groups: int) -> Tensor | None:
        """What piece's queries (head by head, token by token) add to their scores; made once for all layers."""
        if piece.length == 1 or piece.kv.length == 0:
            return None
        mask = self._masks.get(piece.start)
        if mask is None:
            mask = self._masks[piece.start] = _causal_mask(piece, num_groups)
        return mask

    def advance(self) -> None:
        """All layers have run: the new tokens are valid."""
        for piece in self.pieces:
            piece.kv.length += piece.length


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    ragged: RaggedBatch,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for ATTENTION_NAME."""
    assert attention_mask is None
    layer = module.layer_idx
    assert isinstance(layer, int)
    return ragged.attend(layer, query, key, value, scaling), None


def _attend_one(
    query: Tensor, keys: Tensor, values: Tensor, num_queries: int, mask: Tensor | None, scaling: float
) -> Tensor:
    """query (K, G*Q, D) over keys (K, N, D): the G heads of a key-value head are more query rows."""
    if num_queries == 1:
        return scaled_dot_product_attention(query[None], keys[None], values[None], scale=scaling)[0]
    groups = query.shape[1] // num_queries
    if mask is None:
        query = query.view(-1, num_queries, query.shape[2])
        keys = keys.repeat_interleave(groups, 0)
        values = values.repeat_interleave(groups, 0)
        return scaled_dot_product_attention(
            query[None], keys[None], values[None], is_causal=True, scale=scaling
        )[0]
    return scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, scale=scaling)[
        0
    ]


def _causal_mask(piece: Piece, num_groups: int) -> Tensor:
    shape, total = piece.kv.shape, piece.kv.length + piece.length
    hidden = torch.full((piece.length, total), float("-inf"), dtype=shape.dtype, device=shape.device)
    return hidden.triu_(piece.kv.length + 1).repeat(num_groups, 1)
