"""Sampling: one uniform number a token, made from the request's seed and the token's place.

So a token does not depend on what else is in the batch, and a request that was aborted and continued (prompt + partial
ids) samples what it would have sampled.

Legend: R rows (sequences that sample in this step), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RowSampling:
    """How one row samples. `temperature` 0 takes the best token."""

    temperature: float
    top_p: float
    top_k: int
    """-1: all."""
    seed: int
    place: int
    """Index of the token to be sampled in the expanded sequence."""


def sample(logits_RV: Tensor, rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor]:
    """Sampled ids (R) and their log-probs (R) under softmax(logits / temperature), in fp32.

    With top_p or top_k the ids come from the cut distribution and the log-probs stay those of the uncut one; callers
    refuse to report them.
    """
    temperature_R = torch.tensor([row.temperature or 1.0 for row in rows], device=logits_RV.device)
    logp_RV = torch.log_softmax(logits_RV.float() / temperature_R[:, None], dim=-1)
    probs_RV = logp_RV.double().exp()
    for index, row in enumerate(rows):
        if row.temperature == 0:
            probs_RV[index] = torch.nn.functional.one_hot(logp_RV[index].argmax(), logp_RV.shape[1])
        elif row.top_p < 1 or row.top_k > 0:
            probs_RV[index] = _cut(probs_RV[index], row)
    cumulative_RV = probs_RV.cumsum(-1)
    uniform_R = torch.tensor(
        [uniform(row.seed, row.place) for row in rows], dtype=torch.float64, device=logits_RV.device
    )
    target_R1 = (uniform_R * cumulative_RV[:, -1])[:, None]
    ids_R = torch.searchsorted(cumulative_RV, target_R1, right=True)[:, 0].clamp_(max=logp_RV.shape[1] - 1)
    return ids_R, logp_RV.gather(1, ids_R[:, None])[:, 0]


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) from two integers.

    Source: splitmix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    state = _mix((seed & _MASK) ^ _mix(place + 1))
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _cut(probs_V: Tensor, row: RowSampling) -> Tensor:
    sorted_V, order_V = probs_V.sort(descending=True)
    keep_V = torch.ones_like(sorted_V, dtype=torch.bool)
    if row.top_k > 0:
        keep_V[row.top_k :] = False
    if row.top_p < 1:
        keep_V &= sorted_V.cumsum(0) - sorted_V < row.top_p
    keep_V[0] = True
    return torch.zeros_like(probs_V).scatter(0, order_V[keep_V], sorted_V[keep_V])
