"""From a packed micro-batch and its log-probs to what slime_cua.algo.losses takes. No mathematics here.

Legend: R trained rows, S segments, K action steps.
"""

from __future__ import annotations

import numpy as np
import torch

from slime_cua.algo.correction import with_old_policy
from slime_cua.algo.losses import LOSSES, Loss, LossInputs
from slime_cua.config.algo import LossConfig
from slime_cua.core.errors import ConfigError
from slime_cua.data.batch import STEP_TYPES, PackedBatch
from slime_cua.trainer.extra_forwards import ExtraLogprobs


def find_loss(name: str) -> Loss:
    """The loss of that name; ConfigError naming the known ones otherwise."""
    if name not in LOSSES:
        raise ConfigError(f"loss {name!r} is unknown; known: {', '.join(sorted(LOSSES))}")
    return LOSSES[name]


def default_section(name: str, section: LossConfig | None) -> LossConfig:
    """`section`, or the defaults: supervised losses are means over tokens."""
    if section is not None:
        return section
    return LossConfig(aggregate="token") if name == "sft" else LossConfig()


def loss_inputs(
    packed: PackedBatch,
    logp_R: torch.Tensor,
    entropy_R: torch.Tensor | None,
    section: LossConfig,
    num_samples: float,
    num_tokens: float,
    extra: ExtraLogprobs | None = None,
) -> LossInputs:
    """The trained rows of `packed` on the device of logp_R; counts are global. old_logp_T is the engine's."""
    rows = packed.is_trained_T

    def put(values: object) -> torch.Tensor:
        return torch.as_tensor(values, device=logp_R.device)

    return LossInputs(
        logp_T=logp_R,
        old_logp_T=put(packed.old_logp_T[rows]),
        mask_T=torch.ones_like(logp_R, dtype=torch.bool),
        segment_id_T=put(packed.segment_id_T[rows]),
        step_id_T=put(packed.step_id_T[rows]),
        advantage_S=put(packed.advantage_S),
        num_samples=num_samples,
        num_tokens=num_tokens,
        sample_weight_S=put(packed.sample_weight_S),
        step_weight_K=put(packed.step_weights(section.step_weights)),
        step_type_K=put(packed.step_type_K),
        num_types=len(STEP_TYPES),
        ref_logp_T=None if extra is None else extra.ref_R,
        entropy_T=entropy_R,
    )


def chosen_old_policy(
    inputs: LossInputs, section: LossConfig, extra: ExtraLogprobs, is_lost_R: np.ndarray
) -> LossInputs:
    """`inputs` with the old policy, correction and masking of `section`.

    proximal without start log-probs: this is the collection's first optimiser step, so they are the forward's own.
    is_lost_R: for behaviour, tokens whose version's weights are gone; the engine's log-probs stand in.
    """
    lost_R = torch.from_numpy(is_lost_R).to(inputs.logp_T.device)
    return with_old_policy(
        inputs,
        section,
        start_logp_T=inputs.logp_T.detach()
        if extra.start_R is None
        else extra.start_R.to(inputs.logp_T.device),
        version_logp_T=extra.version_logp_R(inputs.logp_T, inputs.old_logp_T, lost_R),
    )
