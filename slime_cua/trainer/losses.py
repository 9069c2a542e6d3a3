"""From a packed micro-batch and its log-probs to what slime_cua.algo.losses takes. No mathematics here.

Legend: R trained rows, S segments, K action steps.
"""

from __future__ import annotations

import torch

from slime_cua.algo.losses import LOSSES, Loss, LossInputs
from slime_cua.config.algo import LossConfig
from slime_cua.core.errors import ConfigError
from slime_cua.data.batch import STEP_TYPES, PackedBatch


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
) -> LossInputs:
    """The trained rows of `packed` on the device of logp_R; counts are global."""
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
        entropy_T=entropy_R,
    )
