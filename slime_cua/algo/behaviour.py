"""pi_old is a named choice: whose log-probs are the denominator of the ratio, and what is corrected besides.

| choice    | old log-probs                                         | ratio = 1 exactly when                                    |
| engine    | returned by the engine with the tokens                | never: engine noise; close at lag 0 and the first step    |
| proximal  | the trainer's forward with the weights before the     | at the first optimiser step of a collection, at any lag:  |
|           | collection's first step; times a truncated correction | with one step a collection the clip does nothing          |
| behaviour | the trainer's forward with the kept weights of the    | lag 0 and first step; at lag 1 it is the true change      |
|           | version that sampled the token                        |                                                           |

Legend: T trained rows (or packed tokens with a mask), S segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from slime_cua.algo.reduce import StepMap, keep

PiOld = Literal["engine", "proximal", "behaviour"]


@dataclass(frozen=True)
class OldPolicy:
    """The denominator of the ratio, and the log-ratio that a correction is made of."""

    old_logp_T: torch.Tensor
    correction_log_ratio_T: torch.Tensor | None
    """log proximal - log engine, for the truncated correction; None if the choice has no correction."""


def old_policy(
    choice: PiOld,
    *,
    engine_logp_T: torch.Tensor,
    start_logp_T: torch.Tensor | None = None,
    version_logp_T: torch.Tensor | None = None,
) -> OldPolicy:
    """The OldPolicy of `choice`, detached.

    engine_logp_T: from the engine. start_logp_T: the trainer's with the weights before the first optimiser step of the
    collection (needed by proximal). version_logp_T: the trainer's with the weights of each token's version (needed by
    behaviour). Raises ValueError naming the missing tensor, or another choice.
    """
    if choice == "engine":
        return OldPolicy(engine_logp_T.detach(), None)
    if choice == "proximal":
        if start_logp_T is None:
            raise ValueError(
                "pi_old = proximal needs start_logp_T: a forward pass before the first optimiser step"
            )
        return OldPolicy(start_logp_T.detach(), (start_logp_T - engine_logp_T).detach())
    if choice == "behaviour":
        if version_logp_T is None:
            raise ValueError(
                "pi_old = behaviour needs version_logp_T: a forward pass with the sampling version's weights"
            )
        return OldPolicy(version_logp_T.detach(), None)
    raise ValueError(f'pi_old {choice!r} must be "engine", "proximal" or "behaviour"')


def truncated_token_weights(log_ratio_T: torch.Tensor, cap: float) -> torch.Tensor:
    """min(exp(log_ratio), cap) a token, detached: truncated importance sampling.

    Source: E. Ionides (2008), "Truncated importance sampling"; for engine mismatch: F. Yao et al. (2025).
    """
    _check_cap(cap)
    return log_ratio_T.detach().clamp(max=_log(cap)).exp()


def truncated_segment_weights(log_ratio_T: torch.Tensor, steps: StepMap, cap: float) -> torch.Tensor:
    """[S] min(exp(sum_k c_k mean_{t in a_k} log_ratio_t), cap), detached: the correction of a sequence-level loss.

    Same weights c_k as the loss' own ratio, so both are of one kind. Multiply it into sample_weight_S, not into num_samples.
    1 for a segment without trained tokens.
    """
    _check_cap(cap)
    clean_T = keep(steps.is_kept_T, log_ratio_T.detach()).to(steps.count_K.dtype)
    means_K = steps.step_means(clean_T[:, None])[:, 0]
    return steps.segment_means(means_K).clamp(max=_log(cap)).exp()


def off_policy_keep(log_ratio_S: torch.Tensor, advantage_S: torch.Tensor, max_gap: float) -> torch.Tensor:
    """[S] booleans: False for a segment of negative advantage whose mean log(old / new) exceeds max_gap.

        keep_i = (A_i >= 0) or (-log_ratio_i <= max_gap),    log_ratio_i = mean log new - log old, as in the loss
    Such a segment has left the policy already; pushing it further down only adds variance. Multiply into sample_weight_S and
    leave num_samples as it is. Source: off-policy sequence masking, DeepSeek-V3.2 report (2025), section 3.1.
    """
    if not max_gap > 0:
        raise ValueError(f"max_gap {max_gap} must be positive")
    return (advantage_S >= 0) | (-log_ratio_S.detach() <= max_gap)


def _check_cap(cap: float) -> None:
    if not cap > 0:
        raise ValueError(f"cap {cap} must be positive; 2 is usual")


def _log(cap: float) -> float:
    return float(torch.tensor(cap, dtype=torch.float64).log())
