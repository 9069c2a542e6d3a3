"""How far engine and trainer are apart: |log-prob of the engine - log-prob of the trainer| on tokens of the current version.

There the weights are the same, so whatever is left is the numeric difference of two implementations. Sums and a histogram
with fixed edges, so that they add over micro-batches and ranks.
"""

from __future__ import annotations

import torch

PER_DECADE = 40
LOWEST, HIGHEST = -7, 2
"""Decades of the edges: 1e-7 ... 1e2 nats; below and above are bins of their own."""
NUM_EDGES = (HIGHEST - LOWEST) * PER_DECADE + 1


def gap_sums(
    engine_R: torch.Tensor, trainer_R: torch.Tensor, is_current_R: torch.Tensor
) -> dict[str, torch.Tensor]:
    """{"gap_count", "gap_sum": scalars, "gap_bins": [NUM_EDGES + 1]} over the tokens where is_current_R."""
    gap = (engine_R - trainer_R.detach()).abs()[is_current_R].double()
    edges = torch.logspace(LOWEST, HIGHEST, NUM_EDGES, dtype=torch.float64, device=gap.device)
    bins = torch.bincount(torch.bucketize(gap, edges), minlength=NUM_EDGES + 1).double()
    return {"gap_count": bins.sum(), "gap_sum": gap.sum(), "gap_bins": bins}


def gap_metrics(count: float, total: float, bins: list[float]) -> dict[str, float]:
    """gap/logp_abs_mean and gap/logp_abs_p99 (the upper edge of the 99th percentile's bin: at most 6 % too high)."""
    if count == 0:
        return {}
    reached, place = 0.0, 0
    for place, number in enumerate(bins):  # noqa: B007
        reached += number
        if reached >= 0.99 * count:
            break
    p99 = 10.0 ** (LOWEST + min(place, NUM_EDGES - 1) / PER_DECADE)
    return {"gap/logp_abs_mean": total / count, "gap/logp_abs_p99": p99}
