"""Puts the chosen pi_old, its truncated correction and off-policy masking into the inputs of a loss.

Legend: T trained rows, S segments.
"""

from __future__ import annotations

import dataclasses

import torch

from slime_cua.algo.behaviour import (
    off_policy_keep,
    old_policy,
    truncated_segment_weights,
    truncated_token_weights,
)
from slime_cua.algo.losses import LossInputs, step_map
from slime_cua.algo.reduce import keep
from slime_cua.config.algo import LossConfig


def with_old_policy(
    inputs: LossInputs,
    config: LossConfig,
    *,
    start_logp_T: torch.Tensor | None = None,
    version_logp_T: torch.Tensor | None = None,
) -> LossInputs:
    """`inputs` (whose old_logp_T is the engine's) as config.pi_old and config.off_policy_max_gap want them.

    proximal: old_logp_T becomes start_logp_T; the truncated correction exp(start - engine) <= correction_cap goes into
    sample_weight_S for gspo (same step weights as the ratio), into token_weight_T for token-level losses.
    behaviour: old_logp_T becomes version_logp_T. engine: unchanged.
    off_policy_max_gap: segments of negative advantage that have moved too far get sample_weight 0; num_samples stays.
    Raises ValueError naming the log-probs that are missing, DataError for engine log-probs that are not finite where trained.
    """
    old = old_policy(
        config.pi_old,
        engine_logp_T=inputs.old_logp_T,
        start_logp_T=start_logp_T,
        version_logp_T=version_logp_T,
    )
    changed = dataclasses.replace(inputs, old_logp_T=old.old_logp_T, pi_old=config.pi_old)
    if old.correction_log_ratio_T is None and config.off_policy_max_gap is None:
        return changed
    steps, weight_S = step_map(changed, config, old.correction_log_ratio_T)
    token_weight_T = inputs.token_weight_T
    if config.off_policy_max_gap is not None:
        delta_T = keep(steps.is_kept_T, (inputs.logp_T - old.old_logp_T).detach()).to(weight_S.dtype)
        log_ratio_S = steps.segment_means(steps.step_means(delta_T[:, None])[:, 0])
        weight_S = weight_S * off_policy_keep(log_ratio_S, inputs.advantage_S, config.off_policy_max_gap)
    if old.correction_log_ratio_T is not None:
        if config.name == "gspo":
            weight_S = weight_S * truncated_segment_weights(
                old.correction_log_ratio_T, steps, config.correction_cap
            )
        else:
            token_weight_T = truncated_token_weights(old.correction_log_ratio_T, config.correction_cap)
    return dataclasses.replace(
        changed,
        sample_weight_S=weight_S,
        token_weight_T=token_weight_T,
        is_off_policy_masked=config.off_policy_max_gap is not None,
    )
