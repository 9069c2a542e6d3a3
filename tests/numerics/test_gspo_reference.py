"""Losses against the slow loops of gspo_reference.py: values, and gradients by finite differences."""

import copy
import itertools

import pytest
import torch

from slime_cua.algo.gspo import gspo_loss
from slime_cua.algo.losses import LOSSES, LossInputs
from slime_cua.config.algo import LossConfig
from tests.numerics.gspo_reference import (
    finite_differences,
    loop_gspo,
    loop_token_loss,
    random_batch,
    steps_of,
)

CLIPS = [(5e-4, 7e-4, None), (0.05, 0.08, None), (0.2, 0.28, 1.05)]


def run_gspo(batch, logp=None, **options):
    return gspo_loss(
        batch.tensor("logp") if logp is None else logp,
        batch.tensor("old_logp"),
        batch.tensor("is_trained"),
        batch.tensor("segment"),
        batch.tensor("step"),
        batch.vector("advantage"),
        sample_weight=batch.vector("sample_weight"),
        step_weight=batch.vector("step_weight"),
        step_type=batch.vector("step_type"),
        num_types=3,
        **options,
    )


@pytest.mark.parametrize(("aggregate", "clip"), list(itertools.product(["step", "token"], CLIPS)))
def test_gspo_loss_equals_the_loop_in_value_and_gradient(aggregate, clip):
    batch = random_batch(seed=11, num_segments=14)
    eps_low, eps_high, dual_clip = clip
    logp = batch.tensor("logp").requires_grad_()
    options = {"aggregate": aggregate, "eps_low": eps_low, "eps_high": eps_high, "dual_clip": dual_clip}
    loss, _ = run_gspo(batch, logp, **options)
    loss.backward()
    assert loss.item() == pytest.approx(loop_gspo(batch, **options), abs=1e-12)
    expected = torch.tensor(finite_differences(batch, lambda: loop_gspo(batch, **options)))
    torch.testing.assert_close(logp.grad, expected.double(), atol=1e-8, rtol=1e-5)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregate", ["step", "token"])
def test_a_kl_term_takes_the_same_step_weights(kl, aggregate):
    batch = random_batch(seed=5, num_segments=14)
    logp = batch.tensor("logp").requires_grad_()
    common = {"aggregate": aggregate, "eps_low": 0.1, "eps_high": 0.1}
    loss, _ = run_gspo(
        batch, logp, kl=(kl, 0.3), ref_logp=batch.tensor("ref_logp"), num_samples=17.0, **common
    )
    loss.backward()

    def reference():
        return loop_gspo(batch, kl=kl, kl_coef=0.3, num_samples=17.0, **common)

    assert loss.item() == pytest.approx(reference(), abs=1e-12)
    expected = torch.tensor(finite_differences(batch, reference)).double()
    torch.testing.assert_close(logp.grad, expected, atol=1e-8, rtol=1e-5)


def test_step_balance_with_weights_equal_to_token_counts_is_standard_gspo():
    batch = random_batch(seed=3)
    batch.step_weight = [1.0] * len(batch.step_weight)
    counted = copy.deepcopy(batch)
    for steps in steps_of(batch).values():
        for step, tokens in steps.items():
            counted.step_weight[step] = float(len(tokens))
    logp, other = batch.tensor("logp").requires_grad_(), batch.tensor("logp").requires_grad_()
    standard, _ = run_gspo(batch, logp, aggregate="token", eps_low=0.1, eps_high=0.1)
    balanced, _ = run_gspo(counted, other, aggregate="step", eps_low=0.1, eps_high=0.1)
    standard.backward()
    balanced.backward()
    assert standard.item() == pytest.approx(balanced.item(), abs=1e-14)
    torch.testing.assert_close(logp.grad, other.grad, atol=1e-15, rtol=1e-12)


def test_autograd_agrees_with_numeric_jacobian_of_gspo():
    batch = random_batch(seed=8, num_segments=4)
    batch.tokens = [token for token in batch.tokens if token.is_trained]
    logp = batch.tensor("logp").requires_grad_()
    assert torch.autograd.gradcheck(
        lambda value: run_gspo(
            batch, value, eps_low=0.3, eps_high=0.3, kl=("k3", 0.1), ref_logp=batch.tensor("ref_logp")
        )[0],
        (logp,),
    )


TOKEN_CONFIGS = [
    LossConfig(name="grpo", aggregate="token", eps_low=0.2, eps_high=0.28, dual_clip=1.2),
    LossConfig(name="grpo", aggregate="step", eps_low=0.2, eps_high=0.28, kl="k3", kl_coef=0.2),
    LossConfig(name="dapo", aggregate="token", eps_low=0.2, eps_high=0.28, entropy_coef=0.1),
    LossConfig(name="dapo", aggregate="step", eps_low=0.2, eps_high=0.28),
    LossConfig(name="cispo", aggregate="token", eps_low=1.0, eps_high=0.3),
    LossConfig(name="cispo", aggregate="step", eps_low=0.1, eps_high=0.3, kl="k2", kl_coef=0.2),
]


@pytest.mark.parametrize("config", TOKEN_CONFIGS, ids=lambda config: f"{config.name}-{config.aggregate}")
def test_token_level_losses_equal_the_loop_in_value_and_gradient(config):
    _compare(config.name, config)


@pytest.mark.parametrize("aggregate", ["step", "token"])
def test_sft_equals_the_loop(aggregate):
    _compare("sft", LossConfig(aggregate=aggregate))


@pytest.mark.parametrize("aggregate", ["step", "token"])
def test_gspo_entropy_bonus_takes_the_weights_of_the_ratio(aggregate):
    batch = random_batch(seed=2)
    config = LossConfig(aggregate=aggregate, entropy_coef=0.2, eps_low=0.1, eps_high=0.1)
    loss, _ = LOSSES["gspo"](_inputs(batch, batch.tensor("logp")), config)
    expected = loop_gspo(
        batch, aggregate=aggregate, eps_low=0.1, eps_high=0.1, entropy_coef=0.2, num_samples=31.0
    )
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def _inputs(batch, logp, token_weight=None):
    return LossInputs(
        logp_T=logp,
        old_logp_T=batch.tensor("old_logp"),
        mask_T=batch.tensor("is_trained"),
        segment_id_T=batch.tensor("segment"),
        step_id_T=batch.tensor("step"),
        advantage_S=batch.vector("advantage"),
        num_samples=31.0,
        num_tokens=404.0,
        sample_weight_S=batch.vector("sample_weight"),
        step_weight_K=batch.vector("step_weight"),
        step_type_K=batch.vector("step_type"),
        num_types=3,
        ref_logp_T=batch.tensor("ref_logp"),
        entropy_T=batch.tensor("entropy"),
        token_weight_T=token_weight,
    )


def _compare(name, config):
    batch = random_batch(seed=21, num_segments=14)
    frozen = copy.deepcopy(batch)
    logp = batch.tensor("logp").requires_grad_()
    loss, _ = LOSSES[name](_inputs(batch, logp, batch.tensor("token_weight")), config)
    loss.backward()

    def reference():
        return loop_token_loss(batch, name, frozen, config, 31.0, 404.0)

    assert loss.item() == pytest.approx(reference(), abs=1e-12)
    expected = torch.tensor(finite_differences(batch, reference)).double()
    torch.testing.assert_close(logp.grad, expected, atol=1e-8, rtol=1e-5)
