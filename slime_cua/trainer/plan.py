"""Which samples go into which micro-batch of which data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence


def plan_microbatches(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> list[list[list[int]]]:
    """Per rank, a list of micro-batches, each a list of sample indices within `max_tokens`.

    Ranks get equal work (longest first to the least loaded), then each packs first-fit. Deterministic: every rank
    computes the whole plan. A rank may get nothing.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return [_first_fit(share, lengths, max_tokens) for share in shares]


def _first_fit(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Longest first, each into the first pack with room."""
    packs: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        for at, free in enumerate(room):
            if lengths[index] <= free:
                packs[at].append(index)
                room[at] -= lengths[index]
                break
        else:
            packs.append([index])
            room.append(max_tokens - lengths[index])
    return packs
