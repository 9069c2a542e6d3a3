"""The table of losses: options that a form does not use are errors; pi_old and masking arrive in the inputs."""

import dataclasses
import math
import typing

import pytest
import torch

from slime_cua.algo.correction import with_old_policy
from slime_cua.algo.losses import LOSSES, LossInputs
from slime_cua.config.algo import LossConfig
from slime_cua.config.base import load
from slime_cua.core.errors import ConfigError, DataError


def inputs_of(delta=0.0, advantage=1.0, **changes):
    logp = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    return dataclasses.replace(
        LossInputs(
            logp_T=logp,
            old_logp_T=logp - delta,
            mask_T=torch.ones(3),
            segment_id_T=torch.tensor([0, 0, 1]),
            step_id_T=torch.tensor([0, 0, 1]),
            advantage_S=torch.tensor([advantage, advantage], dtype=torch.float64),
            num_samples=2.0,
            num_tokens=3.0,
            step_weight_K=torch.ones(2),
        ),
        **changes,
    )


def test_every_name_that_the_config_offers_is_a_loss():
    names = typing.get_args(LossConfig.model_fields["name"].annotation)
    assert set(names) | {"sft"} == set(LOSSES)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["name=cispo", "dual_clip=3"], "cispo does not use dual_clip"),
        (["kl=k3"], "no effect with kl_coef 0"),
        (["kl_coef=0.1"], "no effect without kl"),
        (["dual_clip=0.5"], "dual_clip = 0.5"),
        (["eps_low=0"], "eps_low = 0"),
        (["step_weights.gui=-1"], "step_weights must be >= 0"),
        (["name=ppo"], "name = 'ppo'"),
    ],
)
def test_a_setting_that_would_be_ignored_or_is_out_of_range_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        load(LossConfig, overrides=override)


def test_losses_refuse_inputs_they_would_ignore_and_name_inputs_they_miss():
    ratio_config = LossConfig(entropy_coef=0.1)
    with pytest.raises(ValueError, match="put the correction into sample_weight_S"):
        LOSSES["gspo"](inputs_of(token_weight_T=torch.ones(3)), LossConfig())
    with pytest.raises(ValueError, match="entropy_T"):
        LOSSES["gspo"](inputs_of(), ratio_config)
    with pytest.raises(ValueError, match="entropy_T"):
        LOSSES["dapo"](inputs_of(), LossConfig(name="dapo", entropy_coef=0.1))
    with pytest.raises(ValueError, match="ref_logp"):
        LOSSES["grpo"](inputs_of(), LossConfig(name="grpo", kl="k3", kl_coef=0.1))
    with pytest.raises(ValueError, match="dual_clip"):
        LOSSES["cispo"](inputs_of(), LossConfig(dual_clip=3.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["gspo", "grpo", "dapo", "cispo"])
def test_any_input_of_a_loss_that_is_not_finite_at_a_trained_token_is_named_and_harmless_at_a_masked_one(
    name, bad
):
    vector = torch.tensor([bad, 0.5, 0.5], dtype=torch.float64)
    cases = [
        ({"ref_logp_T": vector}, {"kl": "k2", "kl_coef": 0.1}),
        ({"entropy_T": vector}, {"entropy_coef": 0.1}),
    ]
    if name != "gspo":
        cases.append(({"token_weight_T": vector}, {}))
    for changes, settings in cases:
        config = LossConfig(name=name, **settings)
        with pytest.raises(DataError, match="segment 0 has a log-prob that is NaN or infinite"):
            LOSSES[name](inputs_of(**changes), config)
        logp = torch.tensor([bad, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
        loss, stats = LOSSES[name](inputs_of(**changes, logp_T=logp, mask_T=torch.tensor([0, 1, 1])), config)
        loss.backward()
        assert torch.isfinite(loss) and logp.grad[0] == 0 and torch.isfinite(logp.grad).all()
        assert all(torch.isfinite(value).all() for value in stats.values())


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_an_engine_log_prob_that_is_not_finite_is_named_by_the_correction(name):
    config = LossConfig(name=name, pi_old="proximal")
    inputs = inputs_of(old_logp_T=torch.tensor([-math.inf, -2.0, -3.0], dtype=torch.float64))
    with pytest.raises(DataError, match="segment 0 has a log-prob that is NaN or infinite"):
        with_old_policy(inputs, config, start_logp_T=inputs.logp_T)


@pytest.mark.parametrize("name", ["gspo", "grpo", "dapo", "cispo"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old_logp_T": torch.zeros(1, dtype=torch.float64)}, "old_logp has shape"),
        ({"mask_T": torch.ones(1)}, "mask has shape"),
        ({"sample_weight_S": torch.ones(3)}, "sample_weight"),
        ({"entropy_T": torch.ones(1, dtype=torch.float64)}, "entropy_T"),
    ],
)
def test_a_tensor_of_another_shape_is_named_and_never_broadcast(name, changes, message):
    with pytest.raises(ValueError, match=message):
        LOSSES[name](
            inputs_of(**changes), LossConfig(name=name, entropy_coef=0.1 if "entropy_T" in changes else 0.0)
        )


@pytest.mark.parametrize("count", [0.0, -1.0, math.nan, math.inf])
def test_a_token_count_that_cannot_divide_is_an_error(count):
    config = LossConfig(name="dapo", aggregate="token")
    with pytest.raises(DataError, match=r"num_tokens .* must be positive"):
        LOSSES["dapo"](inputs_of(num_tokens=count), config)


def test_a_reference_so_far_that_its_kl_overflows_is_an_error_in_token_losses():
    reference = torch.tensor([900.0, -2.0, -3.0], dtype=torch.float64)
    for aggregate in ("step", "token"):
        config = LossConfig(
            name="grpo" if aggregate == "step" else "dapo", aggregate=aggregate, kl="k3", kl_coef=0.1
        )
        with pytest.raises(DataError, match="KL overflows"):
            LOSSES[config.name](inputs_of(ref_logp_T=reference), config)


@pytest.mark.parametrize("name", ["gspo", "grpo", "dapo", "cispo"])
@pytest.mark.parametrize(
    "setting", [{"pi_old": "proximal"}, {"pi_old": "behaviour"}, {"off_policy_max_gap": 0.1}]
)
def test_an_old_policy_or_masking_that_was_not_applied_is_refused_not_ignored(name, setting):
    with pytest.raises(ValueError, match="with_old_policy"):
        LOSSES[name](inputs_of(), LossConfig(name=name, **setting))


def test_at_ratio_one_all_policy_losses_are_minus_the_mean_advantage():
    for name in ("gspo", "grpo", "dapo"):
        loss, _ = LOSSES[name](inputs_of(), LossConfig(aggregate="token"))
        assert loss.item() == pytest.approx(-1.0)


def test_sample_mean_and_token_mean_by_hand():
    """NLLs 1, 2 | 3: mean over samples (1.5 + 3) / 2, mean over tokens 6 / 3."""
    assert LOSSES["sft"](inputs_of(), LossConfig(aggregate="step"))[0].item() == pytest.approx(2.25)
    assert LOSSES["sft"](inputs_of(), LossConfig(aggregate="token"))[0].item() == pytest.approx(2.0)


def test_token_clip_fractions_are_shares_of_each_step():
    inputs = inputs_of(step_type_K=torch.tensor([1, 0]), num_types=2)
    inputs = dataclasses.replace(inputs, old_logp_T=inputs.logp_T - torch.tensor([1.0, 0.0, 1.0]))
    _, stats = LOSSES["grpo"](inputs, LossConfig(name="grpo", eps_low=0.2, eps_high=0.2))
    assert stats["clipped"].item() == 2 and stats["clipped_high"].item() == 2
    assert stats["clipped_steps_by_type"].tolist() == [1.0, 0.5]
    assert stats["steps_by_type"].tolist() == [1.0, 1.0]


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    one = {
        "logp_T": logp,
        "old_logp_T": logp.detach() - 5,
        "mask_T": torch.ones(1),
        "segment_id_T": torch.zeros(1, dtype=torch.long),
        "step_id_T": torch.zeros(1, dtype=torch.long),
        "advantage_S": torch.tensor([2.0], dtype=torch.float64),
        "num_samples": 1.0,
        "num_tokens": 1.0,
    }
    LOSSES["cispo"](LossInputs(**one), LossConfig(name="cispo", eps_low=1.0, eps_high=0.3))[0].backward()
    assert logp.grad.item() == pytest.approx(-2.0 * 1.3)


def test_engine_is_the_inputs_own_and_behaviour_replaces_them():
    inputs = inputs_of(delta=0.1)
    same = with_old_policy(inputs, LossConfig())
    assert torch.equal(same.old_logp_T, inputs.old_logp_T) and same.sample_weight_S is None
    other = torch.full((3,), -7.0, dtype=torch.float64)
    changed = with_old_policy(inputs, LossConfig(pi_old="behaviour"), version_logp_T=other)
    assert torch.equal(changed.old_logp_T, other)
    with pytest.raises(ValueError, match="start_logp_T"):
        with_old_policy(inputs, LossConfig(pi_old="proximal"))


@pytest.mark.parametrize("gap", [0.3, 3.0])
def test_proximal_puts_the_truncated_correction_where_the_loss_reads_it(gap):
    inputs = inputs_of(delta=gap)
    start = inputs.logp_T.clone()
    sequence = with_old_policy(inputs, LossConfig(pi_old="proximal"), start_logp_T=start)
    expected = min(math.exp(gap), 2.0)
    assert sequence.sample_weight_S.tolist() == pytest.approx([expected] * 2)
    loss, stats = LOSSES["gspo"](sequence, LossConfig(pi_old="proximal"))
    assert loss.item() == pytest.approx(-expected) and stats["clipped"].item() == 0
    token = with_old_policy(inputs, LossConfig(name="dapo", pi_old="proximal"), start_logp_T=start)
    assert token.token_weight_T.tolist() == pytest.approx([expected] * 3)
    loss, _ = LOSSES["dapo"](token, LossConfig(name="dapo", aggregate="token", pi_old="proximal"))
    assert loss.item() == pytest.approx(-expected)


def test_off_policy_masking_drops_far_negative_segments_and_keeps_the_count():
    config = LossConfig(off_policy_max_gap=0.5, eps_low=0.9, eps_high=0.9)
    far = dataclasses.replace(inputs_of(advantage=-1.0))
    far = dataclasses.replace(far, old_logp_T=far.logp_T + torch.tensor([1.0, 1.0, 0.1]))
    masked = with_old_policy(far, config)
    assert masked.sample_weight_S.tolist() == [0.0, 1.0]
    loss, _ = LOSSES["gspo"](masked, config)
    assert loss.item() == pytest.approx(math.exp(-0.1) / 2)
    kept = with_old_policy(dataclasses.replace(far, advantage_S=-far.advantage_S), config)
    assert kept.sample_weight_S.tolist() == [1.0, 1.0]
