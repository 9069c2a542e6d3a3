"""Means that the trainer makes from the sums of the losses."""

import pytest
import torch

from slime_cua.algo.losses import LOSSES, LossInputs
from slime_cua.config.algo import LossConfig
from slime_cua.data.batch import PackedStep
from slime_cua.trainer.metrics import named_metrics

EMPTY = PackedStep(
    micro_batches=((),),
    num_samples=2.0,
    num_tokens=4,
    num_segments=2,
    cost_by_rank=(0.0,),
    padding_share=0.0,
    refused=(),
)


@pytest.mark.parametrize(
    ("name", "ratio_mean", "clip_fraction"),
    [("gspo", (1.5 ** (1 / 3) + 1) / 2, 1 / 2), ("grpo", 4.5 / 4, 1 / 4), ("cispo", 4.5 / 4, 1 / 4)],
)
def test_ratio_and_clip_fraction_are_means_over_what_has_a_ratio_samples_or_tokens(
    name, ratio_mean, clip_fraction
):
    """Two samples of three and one tokens; one token of the first has moved by a factor of 1.5."""
    old = torch.tensor([-1.0, -2.0, -3.0, -1.0], dtype=torch.float64)
    inputs = LossInputs(
        logp_T=old + torch.tensor([1.5, 1.0, 1.0, 1.0], dtype=torch.float64).log(),
        old_logp_T=old,
        mask_T=torch.ones(4),
        segment_id_T=torch.tensor([0, 0, 0, 1]),
        step_id_T=torch.tensor([0, 0, 0, 1]),
        advantage_S=torch.ones(2, dtype=torch.float64),
        num_samples=2.0,
        num_tokens=4.0,
    )
    _, stats = LOSSES[name](inputs, LossConfig(name=name, eps_low=0.1, eps_high=0.1))
    values = {key: value.item() for key, value in stats.items() if value.dim() == 0}
    metrics = named_metrics(values, {}, name, EMPTY)
    assert metrics["loss/ratio_mean"] == pytest.approx(ratio_mean)
    assert metrics["loss/clip_fraction"] == pytest.approx(clip_fraction)
