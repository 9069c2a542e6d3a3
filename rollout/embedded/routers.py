"""What the routers of a mixture of experts choose, kept beside each sequence's keys and values.

Legend: T tokens of a step, L decoder layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rollout.embedded.ragged import Piece


class Routers:
    """Hooks on a transformers model's routers; without any it does nothing."""

    def __init__(self, model: Any) -> None:
        self._chosen: list[torch.Tensor] = []
        layers = model.model.language_model.layers
        self._num_layers = 0
        for layer in layers:
            gate = getattr(layer.mlp, "gate", None)
            if gate is not None and hasattr(gate, "top_k"):
                gate.register_forward_hook(self._note)
                self._num_layers += 1
        if self._num_layers not in (0, len(layers)):
            raise NotImplementedError(f"{self._num_layers} of {len(layers)} layers have experts: all or none")

    def _note(self, module: Any, inputs: Any, output: Any) -> None:
        self._chosen.append(output[2])

    def record(self, pieces: Sequence[Piece]) -> None:
        """Append the last step's choices [tokens, L, K] to its sequences' buffers."""
        if not self._num_layers:
            return
        chosen_TLK = torch.stack(self._chosen, dim=1).cpu().numpy().astype(np.int16)
        self._chosen.clear()
        for piece in pieces:
            piece.kv.routed.append(chosen_TLK[piece.start : piece.start + piece.length])
