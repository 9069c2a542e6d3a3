"""How far engine and trainer are apart: |log-prob of the engine - log-prob of the trainer| on tokens of the current version.

There the weights are the same, so whatever is left is the numeric difference of two implementations. Sums and a histogram
with fixed edges, so that they add over micro-batches and ranks; one set of them for all tokens, and one for each kind of
token: a wrong position of an image shows in what is conditioned on one, and most in clicks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

PER_DECADE = 40
LOWEST, HIGHEST = -7, 2
"""Decades of the edges: 1e-7 ... 1e2 nats; below and above are bins of their own."""
NUM_EDGES = (HIGHEST - LOWEST) * PER_DECADE + 1
SIGHTS = ("text", "image")
"""Names of False and True: an image stands before the token in its segment."""


def gap_sums(
    engine_R: torch.Tensor,
    trainer_R: torch.Tensor,
    is_current_R: torch.Tensor,
    kinds: Sequence[tuple[Sequence[str], torch.Tensor]] = (),
) -> dict[str, torch.Tensor]:
    """{"gap_count", "gap_sum": scalars, "gap_bins": [NUM_EDGES + 1]} over the tokens where is_current_R.

    kinds: (names, index_R into them) of each way to sort tokens; adds the same three under "/NAME" for each name.
    """
    gap = (engine_R - trainer_R.detach()).abs()[is_current_R].double()
    edges = torch.logspace(LOWEST, HIGHEST, NUM_EDGES, dtype=torch.float64, device=gap.device)
    place = torch.bucketize(gap, edges)
    bins = torch.bincount(place, minlength=NUM_EDGES + 1).double()
    sums = {"gap_count": bins.sum(), "gap_sum": gap.sum(), "gap_bins": bins}
    for names, index_R in kinds:
        index = index_R.to(gap.device)[is_current_R]
        cells = torch.bincount(index * (NUM_EDGES + 1) + place, minlength=len(names) * (NUM_EDGES + 1))
        totals = torch.bincount(index, weights=gap, minlength=len(names))
        for name, kind_bins, total in zip(names, cells.view(len(names), -1).double(), totals, strict=True):
            sums |= {
                f"gap_count/{name}": kind_bins.sum(),
                f"gap_sum/{name}": total,
                f"gap_bins/{name}": kind_bins,
            }
    return sums


def gap_metrics(values: Mapping[str, float], kind: str = "") -> dict[str, float]:
    """gap/logp_abs_mean and gap/logp_abs_p99 (the upper edge of the 99th percentile's bin: at most 6 % too high).

    values: the sums by name, bins as "gap_bins/PLACE". kind: of these tokens only, the metrics have its name at the end.
    """
    end = f"/{kind}" if kind else ""
    count = values.get(f"gap_count{end}", 0.0)
    if count == 0:
        return {}
    reached, place = 0.0, 0
    for place in range(NUM_EDGES + 1):
        reached += values.get(f"gap_bins{end}/{place}", 0.0)
        if reached >= 0.99 * count:
            break
    p99 = 10.0 ** (LOWEST + min(place, NUM_EDGES - 1) / PER_DECADE)
    mean = values.get(f"gap_sum{end}", 0.0) / count
    return {f"gap/logp_abs_mean{end}": mean, f"gap/logp_abs_p99{end}": p99}
