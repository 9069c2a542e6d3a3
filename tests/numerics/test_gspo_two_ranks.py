"""Context parallelism: segments whose tokens lie on two ranks give the loss and gradients of one rank."""

import dataclasses

import pytest
import torch

from slime_cua.algo.losses import LOSSES
from slime_cua.config.algo import LossConfig
from slime_cua.core.errors import DataError
from tests.numerics.gspo_reference import random_batch
from tests.numerics.test_gspo_layout import part
from tests.numerics.two_ranks import run_two_ranks

CONFIGS = [
    LossConfig(aggregate="step", eps_low=0.05, eps_high=0.08, dual_clip=1.2, kl="k3", kl_coef=0.1),
    LossConfig(aggregate="token", eps_low=0.05, eps_high=0.08),
    LossConfig(name="grpo", aggregate="step", eps_low=0.2, eps_high=0.28),
    LossConfig(name="dapo", aggregate="token", eps_low=0.2, eps_high=0.28),
    LossConfig(name="cispo", aggregate="token", eps_low=0.2, eps_high=0.28),
]


def inputs_of(seed=77):
    batch = random_batch(seed)
    inputs = part(batch, batch.tensor("logp"), range(40), order_seed=1)
    return dataclasses.replace(inputs, ref_logp_T=inputs.old_logp_T - 0.1)


def take(inputs, rows, group):
    names = ("logp_T", "old_logp_T", "mask_T", "segment_id_T", "step_id_T", "ref_logp_T")
    own = {name: getattr(inputs, name)[rows].clone() for name in names}
    if inputs.token_weight_T is not None:
        own["token_weight_T"] = inputs.token_weight_T[rows].clone()
    return dataclasses.replace(inputs, cp_group=group, **own)


def loss_and_grad(inputs, config):
    logp = inputs.logp_T.detach().requires_grad_()
    loss, stats = LOSSES[config.name](dataclasses.replace(inputs, logp_T=logp), config)
    loss.backward()
    return loss.item(), logp.grad, stats


def on_two_ranks(group):
    """Three splits of the tokens (halves, alternating, all on rank 0), five losses; then faults."""
    inputs = inputs_of()
    size, rank = inputs.logp_T.shape[0], torch.distributed.get_rank(group)
    everything = torch.arange(size)
    splits = {
        "halves": everything[: size // 2] if rank == 0 else everything[size // 2 :],
        "alternating": everything[rank::2],
        "one empty": everything if rank == 0 else everything[:0],
    }
    results = {
        (name, number): (rows, *loss_and_grad(take(inputs, rows, group), config))
        for name, rows in splits.items()
        for number, config in enumerate(CONFIGS)
    }
    messages = []
    bad = inputs.logp_T.clone()
    bad[inputs.mask_T.nonzero()[0]] = float("nan")
    half = splits["halves"]
    first = int(inputs.mask_T.nonzero()[0])
    far_reference, far_old = inputs.ref_logp_T.clone(), inputs.old_logp_T.clone()
    far_reference[first] = 2000.0
    segment_T = torch.where(inputs.mask_T, inputs.segment_id_T, 0)
    is_pushed_down = (
        inputs.mask_T & (inputs.advantage_S[segment_T] < 0) & (inputs.sample_weight_S[segment_T] > 0)
    )
    far_old[is_pushed_down.nonzero()[0]] = -2000.0
    for changes, config in (
        ({"logp_T": bad}, CONFIGS[0]),
        ({"sample_weight_S": inputs.sample_weight_S * float("nan")}, CONFIGS[0]),
        ({"ref_logp_T": far_reference}, CONFIGS[0]),
        ({"old_logp_T": far_old}, CONFIGS[2]),
        ({"old_logp_T": far_old}, CONFIGS[3]),
        ({"token_weight_T": bad}, CONFIGS[3]),
        ({"num_tokens": 0.0}, CONFIGS[4]),
    ):
        try:
            loss_and_grad(take(dataclasses.replace(inputs, **changes), half, group), config)
        except DataError as error:
            messages.append(str(error))
    return results, messages


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_two_ranks(
        __name__ if "." in __name__ else f"tests.numerics.{__name__}",
        "on_two_ranks",
        tmp_path_factory.mktemp("ranks"),
    )


@pytest.mark.parametrize("number", range(len(CONFIGS)))
@pytest.mark.parametrize("split", ["halves", "alternating", "one empty"])
def test_tokens_on_two_ranks_give_the_loss_gradient_and_statistics_of_one(ranks, split, number):
    want_loss, want_grad, want_stats = loss_and_grad(inputs_of(), CONFIGS[number])
    found = torch.zeros_like(want_grad)
    for results, _ in ranks:
        rows, loss, grad, stats = results[split, number]
        assert loss == pytest.approx(want_loss, abs=1e-12)
        found[rows] += grad
        for name, value in want_stats.items():
            torch.testing.assert_close(stats[name], value, atol=1e-9, rtol=1e-12)
    torch.testing.assert_close(found, want_grad, atol=1e-12, rtol=0)


def test_a_fault_that_one_rank_sees_raises_the_same_error_on_both(ranks):
    messages = ranks[0][1]
    assert messages == ranks[1][1]
    parts = [
        "NaN or infinite at a trained token",
        "sample_weight nan",
        "ratio or KL overflows",
        "an importance ratio overflows",
        "an importance ratio overflows",
        "NaN or infinite at a trained token",
        "num_tokens 0.0",
    ]
    assert len(messages) == len(parts)
    assert all(part in message for part, message in zip(parts, messages, strict=True))
