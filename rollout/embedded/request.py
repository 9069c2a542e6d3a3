"""One generation request inside the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout.embedded.images import PreparedImage
from rollout.embedded.prompt import IntArray, Prompt
from rollout.embedded.ragged import KvBuffer


@dataclass(frozen=True)
class Sampling:
    """Checked sampling parameters."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Finished:
    """What a request gave. `reason` is SGLang's finish_reason, e.g. {"type": "stop", "matched": 2}."""

    output_ids: list[int]
    output_logp: list[float]
    reason: dict[str, Any]
    cached_tokens: int
    weight_version: str
    routed_NLK: np.ndarray | None = None
    """Experts of each token but the last; None for a model without experts."""


@dataclass(eq=False)
class Request:
    """A request on its way: waiting (kv is None), prefilling (kv shorter than the prompt), decoding."""

    rid: str
    prompt: Prompt
    images: list[PreparedImage]
    sampling: Sampling
    on_finish: Callable[[Finished | Exception], None]
    kv: KvBuffer | None = None
    cached_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    output_logp: list[float] = field(default_factory=list)
    tail: str = ""
    """The last characters of the output, long enough to hold any stop string."""

    @property
    def num_prompt(self) -> int:
        return len(self.prompt.ids_N)

    def match_stop(self, tail: str) -> str | None:
        """The stop string that `tail` holds, if any; keeps what a later one may begin with."""
        for text in self.sampling.stop:
            if text in tail:
                return text
        self.tail = tail[-max((len(text) for text in self.sampling.stop), default=1) :]
        return None

    def keys(self) -> IntArray:
        """Cache keys of prompt and output."""
        return np.concatenate([self.prompt.keys_N, np.asarray(self.output_ids, dtype=np.int64)])
