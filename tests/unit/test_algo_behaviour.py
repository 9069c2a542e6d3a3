"""What the ratio is under each choice of pi_old, at lag 0 and 1, at the first and the second optimiser step."""

import math

import pytest
import torch

from slime_cua.algo.behaviour import (
    off_policy_keep,
    old_policy,
    truncated_segment_weights,
    truncated_token_weights,
)
from slime_cua.algo.gspo import gspo_loss
from slime_cua.algo.reduce import build_step_map

NOISE = 0.02
TRAINER_LOGP = {0: -1.0, 1: -1.3, 2: -1.1, 3: -0.9}
"""Trainer's log-prob of one token by weights version; the engine adds NOISE."""


def ratio(choice, sampled_at, collection_start, current):
    """log pi_theta - log pi_old of a token sampled at version `sampled_at`."""
    old = old_policy(
        choice,
        engine_logp_T=torch.tensor([TRAINER_LOGP[sampled_at] + NOISE]),
        start_logp_T=torch.tensor([TRAINER_LOGP[collection_start]]),
        version_logp_T=torch.tensor([TRAINER_LOGP[sampled_at]]),
    )
    return TRAINER_LOGP[current] - old.old_logp_T.item(), old


@pytest.mark.parametrize(
    ("choice", "lag", "step", "expected"),
    [
        ("engine", 0, 1, -NOISE),
        ("engine", 0, 2, TRAINER_LOGP[2] - TRAINER_LOGP[1] - NOISE),
        ("engine", 1, 1, TRAINER_LOGP[1] - TRAINER_LOGP[0] - NOISE),
        ("engine", 1, 2, TRAINER_LOGP[2] - TRAINER_LOGP[0] - NOISE),
        ("proximal", 0, 1, 0.0),
        ("proximal", 1, 1, 0.0),
        ("proximal", 0, 2, TRAINER_LOGP[2] - TRAINER_LOGP[1]),
        ("proximal", 1, 2, TRAINER_LOGP[2] - TRAINER_LOGP[1]),
        ("behaviour", 0, 1, 0.0),
        ("behaviour", 0, 2, TRAINER_LOGP[2] - TRAINER_LOGP[1]),
        ("behaviour", 1, 1, TRAINER_LOGP[1] - TRAINER_LOGP[0]),
        ("behaviour", 1, 2, TRAINER_LOGP[2] - TRAINER_LOGP[0]),
    ],
)
def test_log_ratio_of_each_choice(choice, lag, step, expected):
    start = 1
    found, old = ratio(choice, sampled_at=start - lag, collection_start=start, current=start + step - 1)
    assert found == pytest.approx(expected, abs=1e-6)
    if choice == "proximal":
        correction = TRAINER_LOGP[start] - (TRAINER_LOGP[start - lag] + NOISE)
        assert old.correction_log_ratio_T.item() == pytest.approx(correction, abs=1e-6)
    else:
        assert old.correction_log_ratio_T is None


def test_log_probs_that_a_choice_needs_and_has_not_are_named():
    logp = torch.zeros(1)
    for choice, name in (("proximal", "start_logp_T"), ("behaviour", "version_logp_T"), ("other", "pi_old")):
        with pytest.raises(ValueError, match=name):
            old_policy(choice, engine_logp_T=logp)


def test_corrections_are_cut_at_the_cap_and_carry_no_gradient():
    log_ratio = torch.tensor([0.0, math.log(1.5), 3.0, 1000.0, -5.0], requires_grad=True)
    weights = truncated_token_weights(log_ratio, cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, 1.5, 2.0, 2.0, math.exp(-5)])
    assert not weights.requires_grad
    with pytest.raises(ValueError, match="cap 0"):
        truncated_token_weights(log_ratio, cap=0)


def test_segment_corrections_use_the_means_of_the_loss():
    steps = build_step_map(
        torch.tensor([1, 1, 1, 0]),
        torch.tensor([0, 0, 0, 1]),
        torch.tensor([0, 0, 1, -1]),
        is_active_S=torch.ones(2, dtype=torch.bool),
        step_weight=None,
        num_steps=2,
        aggregate="step",
        dtype=torch.float64,
    )
    log_ratio = torch.tensor([0.2, 0.4, -0.1, math.nan], dtype=torch.float64)
    assert truncated_segment_weights(log_ratio, steps, cap=2.0).tolist() == pytest.approx(
        [math.exp((0.3 - 0.1) / 2), 1.0]
    )
    assert truncated_segment_weights(log_ratio + 9, steps, cap=2.0).tolist() == pytest.approx([2.0, 1.0])


def test_a_correction_of_one_with_the_ratio_of_proximal_leaves_plain_policy_gradient():
    """First optimiser step, proximal: ratio 1, clip idle; the gradient is -C_i A_i / |a| per token."""
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    old = old_policy("proximal", engine_logp_T=logp.detach() - math.log(1.25), start_logp_T=logp.detach())
    steps = build_step_map(
        torch.ones(2),
        torch.zeros(2, dtype=torch.long),
        torch.zeros(2, dtype=torch.long),
        is_active_S=torch.ones(1, dtype=torch.bool),
        step_weight=None,
        num_steps=1,
        aggregate="step",
        dtype=torch.float64,
    )
    weight = truncated_segment_weights(old.correction_log_ratio_T, steps, cap=2.0)
    loss, stats = gspo_loss(
        logp,
        old.old_logp_T,
        torch.ones(2),
        torch.zeros(2, dtype=torch.long),
        torch.zeros(2, dtype=torch.long),
        torch.tensor([2.0], dtype=torch.float64),
        eps_low=5e-4,
        eps_high=7e-4,
        sample_weight=weight,
        num_samples=1.0,
    )
    loss.backward()
    assert logp.grad.tolist() == pytest.approx([-1.25, -1.25])
    assert stats["clipped"].item() == 0


def test_only_negative_segments_far_from_the_old_policy_leave_the_loss():
    kept = off_policy_keep(
        torch.tensor([-0.5, -0.5, 0.5, -0.05]), torch.tensor([-1.0, 1.0, -1.0, -1.0]), max_gap=0.1
    )
    assert kept.tolist() == [False, True, True, True]
    with pytest.raises(ValueError, match="max_gap"):
        off_policy_keep(torch.zeros(1), torch.zeros(1), max_gap=0.0)
