"""Which experts an engine's routers chose, token by token: recorded at sampling, replayed in training.

Legend: N tokens, L decoder layers, K experts a token.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

UNKNOWN = -1
"""In place of an expert: not recorded, the trainer's own choice stands."""


class RoutedExperts(BaseModel):
    """Chosen experts of consecutive positions of a stream, images expanded.

    Example: positions 5 and 6 of a model with 2 layers and 2 experts a token:
        RoutedExperts.from_array(np.array([[[0, 3], [1, 2]], [[0, 1], [2, 3]]]), start=5)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    start: int = Field(ge=0)
    """First position."""
    num_layers: int = Field(ge=1)
    top_k: int = Field(ge=1)
    bytes_per_id: Literal[1, 2] = 1
    data: str
    """Base64 of expert ids [N, L, K], unsigned, little-endian."""

    @model_validator(mode="after")
    def _whole(self) -> RoutedExperts:
        if self._num_bytes() % self._bytes_per_token:
            raise ValueError(
                f"{self._num_bytes()} bytes of routed experts are no multiple of {self._bytes_per_token} a token "
                f"({self.num_layers} layers x {self.top_k} experts)"
            )
        return self

    @classmethod
    def from_array(cls, experts_NLK: NDArray[np.integer], start: int = 0) -> RoutedExperts:
        """Pack an integer array [N, L, K]. Raises ValueError for another rank or a negative id."""
        if experts_NLK.ndim != 3 or (experts_NLK.size and experts_NLK.min() < 0):
            raise ValueError(f"routed experts must be ids of shape [N, L, K], not {experts_NLK.shape}")
        size = 2 if experts_NLK.size and experts_NLK.max() > 255 else 1
        packed = np.ascontiguousarray(experts_NLK, dtype="<u2" if size == 2 else "u1")
        return cls(
            start=start,
            num_layers=experts_NLK.shape[1],
            top_k=experts_NLK.shape[2],
            bytes_per_id=size,
            data=base64.b64encode(packed.tobytes()).decode(),
        )

    @property
    def num_tokens(self) -> int:
        """N."""
        return self._num_bytes() // self._bytes_per_token

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + self.num_tokens

    def to_array(self) -> NDArray[np.int16]:
        """int16 [N, L, K]."""
        flat = np.frombuffer(base64.b64decode(self.data), dtype="<u2" if self.bytes_per_id == 2 else "u1")
        return flat.reshape(-1, self.num_layers, self.top_k).astype(np.int16)

    def cut(self, start: int, end: int) -> RoutedExperts | None:
        """What lies in positions [start, end); None if nothing does."""
        first, last = max(start, self.start), min(end, self.end)
        if first >= last:
            return None
        if (first, last) == (self.start, self.end):
            return self
        return RoutedExperts.from_array(self.to_array()[first - self.start : last - self.start], first)

    @property
    def _bytes_per_token(self) -> int:
        return self.num_layers * self.top_k * self.bytes_per_id

    def _num_bytes(self) -> int:
        return len(self.data) // 4 * 3 - self.data[-2:].count("=")


def join(parts: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
    """One record of a stream from the records of its pieces; where two speak of a position, the earlier one holds.

    A gap ends the record: what follows it is left out. None without any part that begins at 0.
    Raises ValueError when parts are of models of different shape.
    """
    found: list[NDArray[np.int16]] = []
    at = 0
    for part in parts:
        if part is None or part.start > at or part.end <= at:
            continue
        array = part.to_array()[at - part.start :]
        if found and array.shape[1:] != found[0].shape[1:]:
            raise ValueError(
                f"routed experts of shapes {found[0].shape[1:]} and {array.shape[1:]} in one stream"
            )
        found.append(array)
        at = part.end
    return RoutedExperts.from_array(np.concatenate(found)) if found else None
