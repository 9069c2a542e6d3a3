"""The losses the trainer knows, by name. Each is a sum over its micro-batch, already divided by a global count (I5).

Legend: R trained rows, S segments, K action steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slime_cua.config.algo import LossConfig
from slime_cua.core.errors import ConfigError
from slime_cua.trainer.batch import STEP_TYPES, Microbatch

Stats = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LossInput:
    """What a loss may look at."""

    logp_R: torch.Tensor
    """Log-probs of the trained tokens at the sampling temperature; carries the gradient."""
    entropy_R: torch.Tensor | None
    batch: Microbatch
    num_samples: float
    """Global: samples (or the sum of their weights) over all ranks and micro-batches."""
    num_tokens: float
    """Global: trained tokens over all ranks and micro-batches."""
    section: LossConfig | None = None


Loss = Callable[[LossInput], tuple[torch.Tensor, Stats]]


def sft(given: LossInput) -> tuple[torch.Tensor, Stats]:
    """-(1/N) sum of log-probs, N the trained tokens of the whole batch. Stats: sums and counts."""
    total = given.logp_R.sum()
    stats = {"logp_sum": total.detach(), "num_tokens": total.new_tensor(float(given.logp_R.numel()))}
    return -total / max(given.num_tokens, 1.0), stats


def gspo(given: LossInput) -> tuple[torch.Tensor, Stats]:
    """Step-balanced (or standard) GSPO over the whole batch; see slime_cua.algo.gspo.gspo_loss."""
    from slime_cua.algo.gspo import gspo_loss

    section, batch = given.section or LossConfig(), given.batch
    weights = torch.tensor([section.step_weights.get(name, 1.0) for name in STEP_TYPES])
    loss, stats = gspo_loss(
        given.logp_R,
        batch.old_logp_R,
        torch.ones_like(batch.row_R),
        batch.segment_R,
        batch.step_R,
        batch.advantage_S,
        aggregate=section.aggregate,
        step_weight=weights.to(batch.advantage_S.device)[batch.step_type_K],
        eps_low=section.eps_low,
        eps_high=section.eps_high,
        dual_clip=section.dual_clip,
        sample_weight=batch.sample_weight_S,
        num_samples=given.num_samples,
        step_type=batch.step_type_K,
        num_types=len(STEP_TYPES),
    )
    return loss, stats


LOSSES: dict[str, Loss] = {"sft": sft, "gspo": gspo}


def find_loss(name: str) -> Loss:
    """The loss of that name; ConfigError naming the known ones otherwise."""
    if name not in LOSSES:
        raise ConfigError(f"loss {name!r} is unknown; known: {', '.join(sorted(LOSSES))}")
    return LOSSES[name]
