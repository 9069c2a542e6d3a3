"""The same 40 ragged segments in every layout that needs one process: micro-batches, packing orders, DP ranks, empty ranks."""

import itertools
import random

import pytest
import torch

from slime_cua.algo.losses import LOSSES, LossInputs
from slime_cua.config.algo import LossConfig
from tests.numerics.gspo_reference import random_batch

NUM_SAMPLES = 23.5


def part(batch, logp, segments, order_seed):
    """LossInputs of some segments as one micro-batch: own numbering of segments and steps, own token order."""
    rng = random.Random(order_seed)
    segments = list(segments)
    rng.shuffle(segments)
    rows = [i for i, token in enumerate(batch.tokens) if token.segment in set(segments)]
    rng.shuffle(rows)
    steps = sorted({batch.tokens[i].step for i in rows if batch.tokens[i].is_trained})
    rng.shuffle(steps)
    place = {step: k for k, step in enumerate(steps)}
    seat = {segment: s for s, segment in enumerate(segments)}
    double = {"dtype": torch.float64}
    index = torch.tensor(rows, dtype=torch.long)
    return LossInputs(
        logp_T=logp[index],
        old_logp_T=batch.tensor("old_logp")[index],
        mask_T=batch.tensor("is_trained")[index],
        segment_id_T=torch.tensor([seat[batch.tokens[i].segment] for i in rows], dtype=torch.long),
        step_id_T=torch.tensor([place.get(batch.tokens[i].step, -1) for i in rows], dtype=torch.long),
        advantage_S=torch.tensor([batch.advantage[s] for s in segments], **double),
        num_samples=NUM_SAMPLES,
        num_tokens=float(sum(token.is_trained for token in batch.tokens)),
        sample_weight_S=torch.tensor([batch.sample_weight[s] for s in segments], **double),
        step_weight_K=torch.tensor([batch.step_weight[k] for k in steps], **double),
        step_type_K=torch.tensor([batch.step_type[k] for k in steps], dtype=torch.long),
        num_types=3,
    )


def total(batch, config, parts, order_seed=0):
    """Loss, gradient and statistics summed over micro-batches and ranks."""
    logp = batch.tensor("logp").requires_grad_()
    loss_sum, stats_sum = 0.0, {}
    for number, segments in enumerate(parts):
        loss, stats = LOSSES[config.name](part(batch, logp, segments, order_seed + number), config)
        loss.backward()
        loss_sum += loss.item()
        for name, value in stats.items():
            stats_sum[name] = stats_sum.get(name, 0) + value
    return loss_sum, logp.grad, stats_sum


CONFIGS = [
    LossConfig(aggregate="step", eps_low=0.05, eps_high=0.08, dual_clip=1.2),
    LossConfig(aggregate="token", eps_low=0.05, eps_high=0.08),
    LossConfig(name="grpo", aggregate="token", eps_low=0.2, eps_high=0.28),
    LossConfig(name="dapo", aggregate="token", eps_low=0.2, eps_high=0.28),
    LossConfig(name="cispo", aggregate="token", eps_low=0.2, eps_high=0.28),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.name}-{config.aggregate}")
def test_loss_gradient_and_statistics_do_not_depend_on_the_layout(config):
    batch = random_batch(seed=99)
    everything = list(range(40))
    want_loss, want_grad, want_stats = total(batch, config, [everything])
    for num_dp, num_micro, order_seed in itertools.product((1, 2, 4), (1, 3), (1, 2)):
        shuffled = random.Random(order_seed).sample(everything, 40)
        cuts = sorted(random.Random(order_seed + 7).sample(range(41), num_dp * num_micro - 1))
        edges = [0, *cuts, 40]
        parts = [shuffled[a:b] for a, b in itertools.pairwise(edges)] + [[]]
        loss, grad, stats = total(batch, config, parts, order_seed)
        assert loss == pytest.approx(want_loss, abs=1e-12)
        torch.testing.assert_close(grad, want_grad, atol=1e-12, rtol=0)
        for name, value in want_stats.items():
            torch.testing.assert_close(stats[name], value, atol=1e-9, rtol=1e-12)


def test_single_precision_keeps_six_digits_of_the_double_precision_gradient():
    batch = random_batch(seed=98)
    config = CONFIGS[0]
    inputs = part(batch, batch.tensor("logp").requires_grad_(), range(40), 0)
    single = {
        name: value.float().detach()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in vars(inputs).items()
    }
    logp = single["logp_T"].requires_grad_()
    loss, _ = LOSSES["gspo"](LossInputs(**single), config)
    loss.backward()
    double_logp = inputs.logp_T.detach().requires_grad_()
    want, _ = LOSSES["gspo"](LossInputs(**(vars(inputs) | {"logp_T": double_logp})), config)
    want.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    torch.testing.assert_close(logp.grad.double(), double_logp.grad, atol=1e-7, rtol=1e-5)


def test_one_rank_without_trained_tokens_finishes_and_adds_nothing():
    """Mean over samples with trained tokens, counted globally: rank 0 has one masked sample, rank 1 one trained one."""

    def rank(mask, count):
        logp = torch.full((len(mask),), -1.0, requires_grad=True)
        inputs = LossInputs(
            logp_T=logp,
            old_logp_T=logp.detach(),
            mask_T=torch.tensor(mask),
            segment_id_T=torch.zeros(len(mask), dtype=torch.long),
            step_id_T=torch.zeros(len(mask), dtype=torch.long),
            advantage_S=torch.tensor([1.0]),
            num_samples=count,
            num_tokens=2.0,
            step_weight_K=torch.ones(1),
        )
        loss, _ = LOSSES["gspo"](inputs, LossConfig())
        loss.backward()
        return loss.item(), logp.grad.tolist()

    assert rank([0, 0], 1.0) == (0.0, [0.0, 0.0])
    assert rank([1, 1], 1.0) == (-1.0, [-0.5, -0.5])


@pytest.mark.parametrize("name", ["gspo", "grpo", "dapo", "cispo", "sft"])
def test_a_batch_in_which_everything_is_masked_is_an_exact_zero(name):
    logp = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    inputs = LossInputs(
        logp_T=logp,
        old_logp_T=logp.detach(),
        mask_T=torch.zeros(4),
        segment_id_T=torch.tensor([0, 0, 1, 1]),
        step_id_T=torch.tensor([-1, -1, -1, -1]),
        advantage_S=torch.tensor([1.0, -1.0]),
        num_samples=0.0,
        num_tokens=0.0,
    )
    loss, _ = LOSSES[name](inputs, LossConfig(aggregate="token"))
    loss.backward()
    assert (loss.item(), logp.grad.tolist()) == (0.0, [0.0] * 4)
