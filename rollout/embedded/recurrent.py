"""Gated-delta-net layers in a ragged step: each sequence has its own convolution and recurrent state.

The decoding sequences of a step run as one batch of single tokens; a sequence that is being read runs alone. The layer's own
forward is used for both, with transformers' own cache of one layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from rollout.embedded.ragged import Piece, RaggedBatch

States = tuple[Tensor, Tensor]
"""Convolution (1, channels, kernel) and recurrent (1, heads, key size, value size) state of one sequence and layer."""


class _OneLayerCache:
    """What a gated-delta-net layer asks of a cache, for its own index only."""

    def __init__(self, index: int, states: list[States]) -> None:
        self.layer = LinearAttentionLayer()
        self.layers = {index: self.layer}
        if states:
            conv, recurrent = (torch.cat(parts) for parts in zip(*states, strict=True))
            self.layer.lazy_initialization(conv_states=conv, recurrent_states=recurrent)
            self.layer.conv_states[0], self.layer.recurrent_states[0] = conv, recurrent
            self.layer.has_previous_state[0] = True

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return bool(self.layer.has_previous_state[state_idx])

    def update_conv_state(self, states: Tensor, layer_idx: int, **kwargs: Any) -> Tensor:
        return self.layer.update_conv_state(states, **kwargs)

    def update_recurrent_state(self, states: Tensor, layer_idx: int) -> Tensor:
        return self.layer.update_recurrent_state(states)

    def states(self) -> list[States]:
        """States of each sequence of the batch."""
        conv, recurrent = self.layer.conv_states[0], self.layer.recurrent_states[0]
        assert conv is not None and recurrent is not None
        return [
            (c.clone(), r.clone())
            for c, r in zip(conv.split(1), recurrent.split(1), strict=True)
        ]  # fmt: skip


def make_ragged(layer: nn.Module, index: int) -> None:
    """Let the gated-delta-net `layer` of decoder layer `index` run inside ragged steps."""
    layer.forward = functools.partial(_ragged_forward, layer, index)  # type: ignore[method-assign]


def _ragged_forward(
    layer: nn.Module, index: int, hidden_states: Tensor, cache_params: RaggedBatch, **_: Any
) -> Tensor:
    """hidden_states (1, T, H) of all sequences; returns the same shape."""
    output = torch.empty_like(hidden_states)
    single = [piece for piece in cache_params.pieces if piece.length == 1 and index in piece.kv.states]
    if single:
        places = torch.tensor([piece.start for piece in single], device=hidden_states.device)
        output[0, places] = _run(layer, index, single, hidden_states[0, places][:, None])[:, 0]
    for piece in cache_params.pieces:
        if piece.length > 1 or index not in piece.kv.states:
            window = slice(piece.start, piece.start + piece.length)
            output[:, window] = _run(layer, index, [piece], hidden_states[:, window])
    return output


def _run(layer: nn.Module, index: int, pieces: list[Piece], hidden_states: Tensor) -> Tensor:
    cache = _OneLayerCache(index, [piece.kv.states[index] for piece in pieces if index in piece.kv.states])
    forward: Any = type(layer).forward
    output: Tensor = forward(layer, hidden_states=hidden_states, cache_params=cache, attention_mask=None)
    for piece, states in zip(pieces, cache.states(), strict=True):
        piece.kv.states[index] = states
    return output
