"""Context parallelism: which tokens of a packed stream a rank has, and what all ranks know of the trained rows.

Each sequence is 2 N chunks of one length for N ranks; rank r has chunks r and 2 N - 1 - r, so that causal attention costs every
rank the same. mcore-bridge cuts embeddings like that (split_cp_inputs), Transformer Engine's attention expects it.

Legend: T packed tokens, L of this rank (T / N), R trained rows, Q of this rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
import torch.distributed as dist

from slime_cua.trainer.batch import Microbatch


@dataclass(frozen=True)
class Share:
    """What a rank has of a micro-batch."""

    batch: Microbatch
    """Rows and targets are this rank's; token ids, images and sequence boundaries are the whole stream's."""
    token_L: torch.Tensor
    """Places of its tokens in the stream."""
    place_Q: torch.Tensor
    """Places of its trained rows among the micro-batch's R."""
    num_rows: int
    """R."""


def own_tokens(ends: Sequence[int], num_ranks: int, rank: int) -> torch.Tensor:
    """[L]: the tokens of `rank` in its order. ends: where sequences begin, and T.

    Example: ends 0 4 12 over 2 ranks: 0 3 4 5 10 11 and 1 2 6 7 8 9.
    """
    parts = [torch.empty(0, dtype=torch.int64)]
    for begin, end in itertools.pairwise(ends):
        length = (end - begin) // (2 * num_ranks)
        assert length * 2 * num_ranks == end - begin, "a sequence that does not fall into 2 N chunks"
        for chunk in (rank, 2 * num_ranks - 1 - rank):
            parts.append(torch.arange(begin + chunk * length, begin + (chunk + 1) * length))
    return torch.cat(parts)


def share_of(batch: Microbatch, group: Any) -> Share:
    """This rank's share of a micro-batch whose sequences were padded for it."""
    token_L = own_tokens(batch.cu_seqlens.tolist(), dist.get_world_size(group), dist.get_rank(group))
    token_L = token_L.to(batch.token_ids_T.device)
    place_T = torch.full_like(batch.token_ids_T, -1)
    place_T[token_L] = torch.arange(len(token_L), device=token_L.device)
    row_R = place_T[batch.row_R]
    place_Q = torch.nonzero(row_R >= 0)[:, 0]
    own = replace(batch, row_R=row_R[place_Q], target_R=batch.target_R[place_Q])
    return Share(own, token_L, place_Q, len(row_R))


@overload
def rows_of_all(own_Q: torch.Tensor, share: Share, group: Any) -> torch.Tensor: ...
@overload
def rows_of_all(own_Q: None, share: Share, group: Any) -> None: ...
def rows_of_all(own_Q: torch.Tensor | None, share: Share, group: Any) -> torch.Tensor | None:
    """[R] of the micro-batch from what each rank has for its trained rows [Q]; None stays None. A collective."""
    if own_Q is None:
        return None
    whole_R: torch.Tensor = _RowsOfAll.apply(own_Q, share.place_Q, share.num_rows, group)
    return whole_R


class _RowsOfAll(torch.autograd.Function):
    """[R] from each rank's [Q]. Every rank computes the same loss of all rows, so each keeps the gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any, own_Q: torch.Tensor, place_Q: torch.Tensor, num_rows: int, group: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(place_Q)
        whole_R = own_Q.new_zeros(num_rows)
        whole_R[place_Q] = own_Q
        dist.all_reduce(whole_R, group=group)
        return whole_R

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (place_Q,) = ctx.saved_tensors
        return grads[0][place_Q], None, None, None
