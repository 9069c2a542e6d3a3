"""Finished sequences keep their keys and values; a new prompt starts from the longest prefix that one of them holds."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from rollout.embedded.prompt import IntArray, common_prefix
from rollout.embedded.ragged import KvBuffer, KvShape

_MIN_REUSE_TOKENS = 8


class Sequence:
    """A buffer and what its tokens are matched by."""

    def __init__(self, kv: KvBuffer, keys_N: IntArray) -> None:
        self.kv = kv
        self.keys_N = keys_N


class PrefixPool:
    """Idle sequences, least recently used first, at most `max_tokens` in all."""

    def __init__(self, shape: KvShape, max_tokens: int) -> None:
        self._shape = shape
        self._max_tokens = max_tokens
        self._idle: OrderedDict[int, Sequence] = OrderedDict()
        self._next = 0

    @property
    def num_tokens(self) -> int:
        return sum(sequence.kv.length for sequence in list(self._idle.values()))

    def acquire(self, keys_N: IntArray, running: list[Sequence]) -> tuple[KvBuffer, int]:
        """A buffer that holds the longest known prefix of `keys_N`, and that prefix's length.

        At least the last token is left to compute. An idle sequence that the prompt extends is taken over; a prefix of
        another one, idle or running, is copied, unless layers with running states forbid it.
        """
        best_length, best, best_slot = 0, None, None
        candidates = [(slot, sequence) for slot, sequence in self._idle.items()]
        if not self._shape.is_recurrent:
            candidates += [(-1, sequence) for sequence in running]
        for slot, sequence in candidates:
            length = min(common_prefix(keys_N, sequence.keys_N[: sequence.kv.length]), len(keys_N) - 1)
            if self._shape.is_recurrent and length < sequence.kv.length:
                continue
            if length > best_length:
                best_length, best, best_slot = length, sequence, slot
        if best is None or best_slot is None or best_length < _MIN_REUSE_TOKENS:
            return KvBuffer(self._shape, len(keys_N)), 0
        if best_slot >= 0 and best_length == best.kv.length:
            del self._idle[best_slot]
            return best.kv, best_length
        if best_slot >= 0:
            self._idle.move_to_end(best_slot)
        fresh = KvBuffer(self._shape, len(keys_N))
        fresh.copy_prefix(best.kv, best_length)
        return fresh, best_length

    def release(self, kv: KvBuffer, keys: IntArray) -> None:
        """Keep a finished sequence; drop the oldest ones over the limit."""
        if kv.length == 0:
            return
        self._idle[self._next] = Sequence(kv, np.ascontiguousarray(keys[: kv.length]))
        self._next += 1
        total = self.num_tokens
        while total > self._max_tokens and self._idle:
            total -= self._idle.popitem(last=False)[1].kv.length

    def clear(self) -> None:
        """Forget everything: the weights have changed, or a flush was asked."""
        self._idle.clear()
