"""gspo_loss: hand-worked numbers, masks, bad input."""

import math

import pytest
import torch

from slime_cua.algo.gspo import gspo_loss
from slime_cua.core.errors import DataError

INF, NAN = math.inf, math.nan


def loss_of(delta, segment, step, advantage, mask=None, **options):
    """Loss, gradient and stats when logp - old_logp is `delta`."""
    old = torch.full((len(delta),), -2.0, dtype=torch.float64)
    logp = (old + torch.tensor(delta, dtype=torch.float64)).requires_grad_()
    options = {"eps_low": 0.2, "eps_high": 0.28} | options
    loss, stats = gspo_loss(
        logp,
        old,
        torch.ones(len(delta), dtype=torch.bool) if mask is None else torch.tensor(mask),
        torch.tensor(segment),
        torch.tensor(step),
        torch.tensor(advantage, dtype=torch.float64),
        **options,
    )
    loss.backward()
    return loss.item(), logp.grad.tolist(), stats


def test_one_long_code_step_beside_two_gui_steps_has_a_third_of_the_gradient_and_0_83_in_standard_gspo():
    lengths = [60, 600, 60]
    step = [k for k, length in enumerate(lengths) for _ in range(length)]
    shares = {}
    for aggregate in ("step", "token"):
        _, gradient, stats = loss_of(
            [0.0] * 720,
            [0] * 720,
            step,
            [1.0],
            aggregate=aggregate,
            step_type=torch.tensor([0, 1, 0]),
            num_types=2,
        )
        by_step = [sum(g for g, k in zip(gradient, step, strict=True) if k == i) for i in range(3)]
        shares[aggregate] = [g / sum(by_step) for g in by_step]
        assert stats["share_sum_by_type"][1].item() == pytest.approx(shares[aggregate][1])
    assert shares["step"] == pytest.approx([1 / 3] * 3)
    assert shares["token"] == pytest.approx([1 / 12, 10 / 12, 1 / 12])


def test_step_balance_has_2_8_times_the_noise_of_standard_gspo_in_that_sample():
    """The variance of log w under independent unit noise a token is the sum of squared gradients of log w."""
    step = [0] * 60 + [1] * 600 + [2] * 60
    variance = {
        aggregate: sum(g * g for g in loss_of([0.0] * 720, [0] * 720, step, [1.0], aggregate=aggregate)[1])
        for aggregate in ("step", "token")
    }
    assert variance["token"] == pytest.approx(1 / 720)
    assert variance["step"] / variance["token"] == pytest.approx(2.8)


def test_hand_worked_step_means_and_ratio():
    # step 0: mean(0.1, 0.3) = 0.2; step 1: -0.1; alpha 1 and 3: log w = (0.2 - 0.3) / 4 = -0.025
    loss, gradient, stats = loss_of(
        [0.1, 0.3, -0.1], [0, 0, 0], [0, 0, 1], [2.0], step_weight=torch.tensor([1.0, 3.0])
    )
    w = math.exp(-0.025)
    assert loss == pytest.approx(-2 * w)
    assert gradient == pytest.approx([-2 * w / 8, -2 * w / 8, -2 * w * 3 / 4])
    assert stats["ratio_sum"].item() == pytest.approx(w)


def test_standard_gspo_is_the_mean_over_tokens():
    loss, _, _ = loss_of([0.1, 0.3, -0.1], [0, 0, 0], [0, 0, 1], [2.0], aggregate="token")
    assert loss == pytest.approx(-2 * math.exp(0.1))


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected", "with_c_off", "is_moving"),
    [
        (-1.0, 10.0, 3.0, 10.0, False),
        (-1.0, 2.0, 2.0, 2.0, True),
        (-1.0, 0.5, 0.8, 0.8, False),
        (1.0, 10.0, -1.28, -1.28, False),
        (1.0, 0.5, -0.5, -0.5, True),
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages_only(
    advantage, ratio, expected, with_c_off, is_moving
):
    loss, gradient, _ = loss_of([math.log(ratio)], [0], [0], [advantage], dual_clip=3.0)
    assert loss == pytest.approx(expected, abs=1e-9)
    assert (gradient[0] != 0.0) == is_moving
    loss, _, _ = loss_of([math.log(ratio)], [0], [0], [advantage])
    assert loss == pytest.approx(with_c_off, abs=1e-9)


def test_clip_fraction_of_a_type_counts_its_steps_in_clipped_samples():
    # segment 0 (ratio e) is clipped high with a gui and a code step; segment 1 (ratio 1) is not, with two gui steps
    _, gradient, stats = loss_of(
        [1.0, 1.0, 0.0, 0.0],
        [0, 0, 1, 1],
        [0, 1, 2, 3],
        [1.0, 1.0],
        step_type=torch.tensor([0, 1, 0, 0]),
        num_types=3,
    )
    assert gradient[:2] == [0.0, 0.0]
    assert stats["clipped_steps_by_type"].tolist() == [1, 1, 0]
    assert stats["steps_by_type"].tolist() == [3, 1, 0]
    assert stats["clipped"].item() == stats["clipped_high"].item() == 1
    assert stats["share_sum_by_type"].tolist() == pytest.approx([1.5, 0.5, 0.0])
    assert stats["ratio_sum_by_type"].tolist() == pytest.approx([2 + math.e, math.e, 0])
    assert stats["behaviour_kl_sum_by_type"].tolist() == pytest.approx([math.e - 2, math.e - 2, 0])


def test_statistics_add_over_micro_batches():
    whole = loss_of([0.1, 0.2, 0.3], [0, 1, 1], [0, 1, 2], [1.0, -1.0], num_samples=2.0)[2]
    parts = [
        loss_of([0.1], [0], [0], [1.0], num_samples=2.0)[2],
        loss_of([0.2, 0.3], [0, 0], [0, 1], [-1.0], num_samples=2.0)[2],
    ]
    for name, value in whole.items():
        assert value.item() == pytest.approx(sum(part[name].item() for part in parts)), name


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_masked_positions_may_hold_anything_and_give_exact_zeros(garbage):
    clean = loss_of([0.1, 0.2], [0, 0], [0, 0], [1.5])
    dirty = loss_of([0.1, garbage, 0.2, garbage], [0, -7, 0, 99], [0, -1, 0, 12345], [1.5], mask=[1, 0, 1, 0])
    assert dirty[0] == clean[0]
    assert dirty[1] == [clean[1][0], 0.0, clean[1][1], 0.0]


def test_masked_garbage_is_harmless_in_single_precision_with_kl_too():
    logp = torch.tensor([-1.0, NAN, -INF], requires_grad=True)
    old = torch.tensor([-1.0, INF, NAN])
    loss, _ = gspo_loss(
        logp,
        old,
        torch.tensor([True, False, False]),
        torch.zeros(3, dtype=torch.long),
        torch.zeros(3, dtype=torch.long),
        torch.tensor([1.0]),
        eps_low=0.1,
        eps_high=0.1,
        kl="k3",
        ref_logp=old,
    )
    loss.backward()
    assert (loss.item(), logp.grad.tolist()) == (-1.0, [-1.0, 0.0, 0.0])


def test_an_empty_batch_is_an_exact_zero_with_a_backward():
    for length, segments, steps in ((0, 0, None), (0, 2, 0), (3, 1, None), (3, 0, 2), (3, 2, 4)):
        logp = torch.zeros(length, requires_grad=True)
        loss, stats = gspo_loss(
            logp,
            torch.zeros(length),
            torch.zeros(length, dtype=torch.bool),
            torch.zeros(length, dtype=torch.long),
            torch.zeros(length, dtype=torch.long),
            torch.ones(segments),
            eps_low=0.1,
            eps_high=0.1,
            num_samples=5.0,
            step_weight=None if steps is None else torch.ones(steps),
            step_type=None if steps is None else torch.zeros(steps, dtype=torch.long),
            num_types=2,
        )
        loss.backward()
        assert loss.item() == 0.0 and math.copysign(1, loss.item()) == 1
        assert logp.grad.tolist() == [0.0] * length
        assert all(value.sum().item() == 0 for value in stats.values())


def test_the_default_count_is_the_segments_with_trained_tokens():
    loss, _, _ = loss_of([0.0, 0.0], [0, 1], [0, 1], [1.0, 1.0], mask=[1, 0])
    assert loss == -1.0


def test_a_sample_of_weight_zero_is_out_whatever_it_holds():
    alone = loss_of([0.1], [0], [0], [1.0])
    both = loss_of(
        [0.1, NAN], [0, 1], [0, 1], [1.0, NAN], sample_weight=torch.tensor([1.0, 0.0], dtype=torch.float64)
    )
    assert both[0] == alone[0] and both[1] == [alone[1][0], 0.0]
    assert both[2]["num_samples"].item() == 1


def test_advantage_zero_gives_an_exact_zero_even_at_a_ratio_that_overflows():
    loss, gradient, _ = loss_of([5000.0], [0], [0], [0.0])
    assert (loss, gradient) == (0.0, [0.0])


@pytest.mark.parametrize("step_weight", [None, torch.tensor([1.0, 0.0], dtype=torch.float64)])
def test_a_reference_so_far_that_its_kl_overflows_is_an_error_even_in_a_step_of_weight_zero(step_weight):
    reference = torch.tensor([-2.0, 900.0], dtype=torch.float64)
    with pytest.raises(DataError, match=r"the loss is .*: ratio or KL overflows"):
        loss_of([0.0, 0.0], [0, 0], [0, 1], [1.0], kl="k3", ref_logp=reference, step_weight=step_weight)


def test_statistics_of_a_clipped_overflowing_ratio_are_finite():
    _, _, stats = loss_of(
        [800.0], [0], [0], [1.0], step_type=torch.tensor([0], dtype=torch.long), num_types=1
    )
    assert all(torch.isfinite(value).all() for value in stats.values())


def test_a_huge_ratio_on_the_clipped_side_gives_the_bound_and_no_nan():
    loss, gradient, _ = loss_of([5000.0], [0], [0], [1.0])
    assert (loss, gradient) == (-1.28, [0.0])


def test_a_step_without_trained_tokens_does_not_count():
    with_ghost = loss_of([0.1, 9.0, 0.3], [0, 0, 0], [0, 1, 2], [1.0], mask=[1, 0, 1])
    assert with_ghost[0] == pytest.approx(-math.exp(0.2))
    assert with_ghost[2]["num_steps"].item() == 2


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([NAN], [0], [0], [1.0]), {}, "segment 0 has a log-prob that is NaN"),
        (([INF], [0], [0], [1.0]), {}, "segment 0 has a log-prob that is NaN or infinite"),
        (([0.0], [1], [0], [1.0]), {}, "segment id outside 0..0"),
        (([0.0], [0], [3], [1.0]), {"step_weight": torch.ones(2)}, "step id outside 0..1"),
        (([0.0, 0.0], [0, 1], [0, 0], [1.0, 1.0]), {}, "step 0 has tokens in two segments"),
        (([0.0], [0], [0], [1.0]), {"step_weight": torch.zeros(1)}, "no step with a positive weight"),
        (([0.0], [0], [0], [1.0]), {"step_weight": torch.tensor([-1.0])}, "weight of step 0 is negative"),
        (
            ([0.0], [0], [0], [1.0]),
            {"step_weight": torch.tensor([NAN])},
            "weight of step 0 is negative or not finite",
        ),
        (([0.0], [0], [0], [NAN]), {}, "segment 0: advantage nan"),
        (([0.0], [0], [0], [1.0]), {"num_samples": 0.0}, "num_samples 0.0 must be positive"),
        (([0.0], [0], [0], [1.0]), {"num_samples": NAN}, "num_samples nan must be positive"),
        (([0.0], [0], [0], [1.0]), {"num_samples": INF}, "num_samples inf must be positive"),
        (([0.0], [0], [0], [1.0]), {"sample_weight": torch.tensor([-1.0])}, "no weight is negative"),
        (([0.0], [0], [10**13], [1.0]), {}, "step id 10000000000000: number the steps"),
        (([800.0], [0], [0], [-1.0]), {}, "ratio overflows at index 0"),
        (
            ([0.0], [0], [0], [1.0]),
            {"step_type": torch.tensor([4]), "num_types": 2},
            "step_type must be in 0..1",
        ),
    ],
)
def test_bad_numbers_are_named_errors(arguments, options, message):
    with pytest.raises(DataError, match=message):
        loss_of(*arguments, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old_logp": torch.zeros(3)}, "old_logp has shape"),
        ({"old_logp": torch.zeros(2, dtype=torch.float64)}, "must share a float dtype"),
        ({"mask": torch.ones(2, 1)}, "mask has shape"),
        ({"step_id": torch.zeros(2)}, "step_id must hold integers"),
        ({"advantage": torch.tensor([1])}, "advantage must be floats"),
        ({"sample_weight": torch.ones(3)}, "sample_weight"),
        ({"step_weight": torch.ones(1, 1)}, "step_weight must be"),
        ({"step_weight": torch.ones(1), "step_type": torch.zeros(2, dtype=torch.long)}, "must both be"),
        ({"aggregate": "sequence"}, 'must be "step" or "token"'),
        ({"eps_low": 0.0}, "must be positive"),
        ({"dual_clip": 0.5}, "dual_clip 0.5 must be above 1"),
        ({"kl": "k4", "ref_logp": torch.zeros(2)}, "kl 'k4' must be"),
        ({"kl": "k1"}, "ref_logp"),
        ({"num_types": 0}, "num_types 0"),
    ],
)
def test_wrong_shapes_dtypes_and_options_are_value_errors(changes, message):
    arguments = {
        "logp": torch.zeros(2),
        "old_logp": torch.zeros(2),
        "mask": torch.ones(2, dtype=torch.bool),
        "segment_id": torch.zeros(2, dtype=torch.long),
        "step_id": torch.zeros(2, dtype=torch.long),
        "advantage": torch.ones(1),
        "eps_low": 0.1,
        "eps_high": 0.1,
    }
    with pytest.raises(ValueError, match=message):
        gspo_loss(**(arguments | changes))


def test_a_one_off_shift_of_logits_and_tokens_changes_the_log_probs():
    logits = torch.tensor(
        [[1.0, 0.0, -1.0], [0.5, 2.0, -0.5], [0.0, 1.0, 3.0], [2.0, 0.0, 0.0]], dtype=torch.float64
    )
    tokens, mask = torch.tensor([0, 2, 1, 1]), torch.tensor([0, 0, 1, 1])
    log_p = torch.log_softmax(logits, dim=-1)
    right = log_p[:-1].gather(1, tokens[1:, None])[:, 0]
    assert right.tolist() == pytest.approx([-2.4076059644443806, -0.26636789980713366, -2.1698460195562856])
    assert (right * mask[1:]).sum().item() == pytest.approx(-2.436213919363419, abs=1e-9)
    unshifted = log_p.gather(1, tokens[:, None])[:, 0]
    assert (unshifted * mask).sum().item() == pytest.approx(-4.40939078577817, abs=1e-9)
