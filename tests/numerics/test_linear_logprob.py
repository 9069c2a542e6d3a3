"""Log-probs of trained rows from hidden states: against torch's log-softmax, by finite differences, over two shards."""

import math

import pytest
import torch

from slime_cua.kernels.linear_logprob import linear_logprob
from slime_cua.kernels.torch_logprob import torch_linear_logprob
from tests.numerics.two_ranks import run_two_ranks

TEMPERATURE, VOCAB = 0.6, 43


def make(rows=13, hidden=7, vocab_rows=48, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden_RH = torch.randn(rows, hidden, generator=generator, dtype=torch.float64).to(dtype)
    weight_VH = torch.randn(vocab_rows, hidden, generator=generator, dtype=torch.float64).to(dtype)
    weight_VH[VOCAB:] *= 50  # padding that would win if it counted
    target_R = torch.randint(0, VOCAB, (rows,), generator=generator)
    return hidden_RH, weight_VH, target_R


def plain(hidden_RH, weight_VH, target_R, temperature=TEMPERATURE, vocab_size=VOCAB):
    log_p_RV = torch.log_softmax(hidden_RH @ weight_VH[:vocab_size].T / temperature, dim=-1)
    return log_p_RV.gather(1, target_R[:, None])[:, 0], -(log_p_RV.exp() * log_p_RV).sum(dim=-1)


def gradients(function, *leaves):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    logp_R, entropy_R = function(*leaves)
    scale_R = torch.linspace(-1, 1, logp_R.shape[0], dtype=logp_R.dtype)
    (logp_R * scale_R).sum().backward(retain_graph=True)
    if entropy_R is not None and entropy_R.requires_grad:
        (entropy_R * scale_R.flip(0)).sum().backward()
    return logp_R.detach(), entropy_R, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("memory", ["auto", "fast", "lean"])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_value_and_gradient_equal_the_plain_log_softmax(memory, entropy_grad):
    hidden_RH, weight_VH, target_R = make()
    logp_R, entropy_R, found = gradients(
        lambda h, w: linear_logprob(
            h,
            w,
            target_R,
            temperature=TEMPERATURE,
            vocab_size=VOCAB,
            entropy_grad=entropy_grad,
            memory=memory,
        ),
        hidden_RH,
        weight_VH,
    )

    def reference(h, w):
        logp, entropy = plain(h, w, target_R)
        return logp, entropy if entropy_grad else entropy.detach()

    want_logp, want_entropy, want = gradients(reference, hidden_RH, weight_VH)
    torch.testing.assert_close(logp_R, want_logp, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy_R.detach(), want_entropy.detach(), atol=1e-12, rtol=0)
    for mine, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=0)
    assert (found[1][VOCAB:] == 0).all()


def test_finite_differences_agree():
    hidden_RH, weight_VH, target_R = make(rows=4, hidden=3)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprob(
            h, w, target_R, temperature=TEMPERATURE, vocab_size=VOCAB, entropy_grad=True
        ),
        (hidden_RH.requires_grad_(), weight_VH[:46].contiguous().requires_grad_()),
    )


def test_many_small_blocks_give_what_one_block_gives():
    hidden_RH, weight_VH, target_R = make(rows=29)
    whole = gradients(lambda h, w: linear_logprob(h, w, target_R), hidden_RH, weight_VH)
    blocks = gradients(
        lambda h, w: torch_linear_logprob(
            h,
            w,
            target_R,
            temperature=1.0,
            vocab_size=48,
            tp_group=None,
            with_entropy=True,
            entropy_grad=False,
            main_grad=None,
            memory="auto",
            block_bytes=4 * 48 * 8,
        ),
        hidden_RH,
        weight_VH,
    )
    torch.testing.assert_close(blocks[0], whole[0], atol=1e-13, rtol=0)
    for mine, theirs in zip(blocks[2], whole[2], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


def test_bf16_inputs_are_accumulated_in_fp32():
    hidden_RH, weight_VH, target_R = make(rows=64, hidden=256, dtype=torch.bfloat16)
    hidden_RH, weight_VH = hidden_RH / 4, weight_VH[:VOCAB] / 4
    logp_R, _, grads = gradients(lambda h, w: linear_logprob(h, w, target_R), hidden_RH, weight_VH)
    want_logp, _, want = gradients(
        lambda h, w: (plain(h, w, target_R, temperature=1.0)[0], None), hidden_RH.double(), weight_VH.double()
    )
    assert logp_R.dtype == torch.float32 and grads[0].dtype == torch.bfloat16
    assert (logp_R.double() - want_logp).abs().max() < 2e-3
    for mine, theirs in zip(grads, want, strict=True):
        assert (mine.double() - theirs).norm() / theirs.norm() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_around_forward_and_backward_rounds_nothing(dtype):
    hidden_RH, weight_VH, target_R = make(rows=32, hidden=128, dtype=dtype)
    want = gradients(lambda h, w: linear_logprob(h, w, target_R), hidden_RH, weight_VH)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(lambda h, w: linear_logprob(h, w, target_R), hidden_RH, weight_VH)
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[2], want[2], strict=True))


def test_large_logits_do_not_overflow():
    hidden_RH, weight_VH, target_R = make(dtype=torch.float32)
    logp_R, entropy_R = linear_logprob(hidden_RH * 1e4, weight_VH, target_R)
    assert torch.isfinite(logp_R).all() and torch.isfinite(entropy_R).all()


def test_no_rows_are_legal_and_the_weight_gradient_is_zero():
    hidden_RH, weight_VH, target_R = make(rows=0)
    logp_R, entropy_R, grads = gradients(lambda h, w: linear_logprob(h, w, target_R), hidden_RH, weight_VH)
    assert logp_R.shape == entropy_R.shape == (0,)
    assert grads[0].shape == hidden_RH.shape and (grads[1] == 0).all()


def test_the_temperature_of_the_sampler_makes_the_ratio_one():
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    weight_VH, target_R = torch.eye(3, dtype=torch.float64), torch.tensor([0])
    at_t, _ = linear_logprob(logits, weight_VH, target_R, temperature=0.6)
    at_1, _ = linear_logprob(logits, weight_VH, target_R)
    assert at_t.item() == pytest.approx(-0.20257309980325708, abs=1e-6)
    assert at_1.item() == pytest.approx(-0.4076059644443804, abs=1e-6)
    assert math.exp(at_1.item() - at_t.item()) == pytest.approx(0.8146205437596578, abs=1e-6)


def test_without_entropy_there_is_none():
    assert linear_logprob(*make(), with_entropy=False)[1] is None


def test_main_grad_takes_the_weight_gradient_and_adds_to_what_is_there():
    hidden_RH, weight_VH, target_R = make(dtype=torch.float32)
    want = gradients(lambda h, w: linear_logprob(h, w, target_R), hidden_RH, weight_VH)[2][1]
    weight = torch.nn.Parameter(weight_VH)
    main_grad = torch.ones_like(weight)
    logp_R, _ = linear_logprob(hidden_RH, weight, target_R, main_grad=main_grad)
    (logp_R * torch.linspace(-1, 1, 13)).sum().backward()
    torch.testing.assert_close(main_grad, 1 + want)
    assert weight.grad is None
    weight.grad_added_to_main_grad = False
    logp_R, _ = linear_logprob(hidden_RH, weight, target_R, main_grad=main_grad)
    logp_R.sum().backward()
    assert weight.grad_added_to_main_grad is True and (weight.grad == 0).all()


def test_a_frozen_head_or_frozen_body_gets_no_gradient():
    hidden_RH, weight_VH, target_R = make()
    hidden_RH.requires_grad_()
    linear_logprob(hidden_RH, weight_VH, target_R)[0].sum().backward()
    assert weight_VH.grad is None and hidden_RH.grad is not None
    weight_VH.requires_grad_()
    linear_logprob(hidden_RH.detach(), weight_VH, target_R)[0].sum().backward()
    assert weight_VH.grad is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_R": torch.full((13,), VOCAB)}, r"target ids span 43..43; the vocabulary is 0..42"),
        ({"target_R": torch.full((13,), -1)}, "target ids span -1"),
        ({"target_R": torch.zeros(4, dtype=torch.long)}, "one id for each of the 13 rows"),
        ({"target_R": torch.zeros(13)}, "must be int64"),
        ({"weight_VH": torch.zeros(48, 6, dtype=torch.float64)}, r"\[R, H\] and \[V, H\]"),
        ({"weight_VH": torch.zeros(48, 7)}, "share a float dtype"),
        ({"temperature": 0.0}, "temperature 0.0 must be a positive number"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": 1e-320}, "temperature 1e-320"),
        ({"vocab_size": 49}, "vocab_size 49 must be in 1..48"),
        ({"main_grad": torch.zeros(3, 7)}, "main_grad"),
        ({"main_grad": torch.zeros(48, 7, dtype=torch.int64)}, "main_grad torch.int64"),
        ({"main_grad": torch.zeros(48, 7, device="meta")}, "main_grad is on meta"),
        ({"memory": "big"}, 'must be "auto", "fast" or "lean"'),
    ],
)
def test_bad_arguments_are_named(changes, message):
    hidden_RH, weight_VH, target_R = make()
    arguments = {"hidden_RH": hidden_RH, "weight_VH": weight_VH, "target_R": target_R, "vocab_size": VOCAB}
    with pytest.raises(ValueError, match=message):
        linear_logprob(**(arguments | changes))


def on_two_ranks(group):
    """Shards of 24 rows; then shards of 48 of which the second is padding only; then no rows."""
    rank = torch.distributed.get_rank(group)
    results = []
    for rows, vocab_rows in ((13, 48), (13, 96), (0, 48)):
        hidden_RH, weight_VH, target_R = make(rows=rows, vocab_rows=vocab_rows)
        shard = weight_VH.chunk(2)[rank]
        results.append(
            gradients(
                lambda h, w, t=target_R: linear_logprob(
                    h, w, t, temperature=TEMPERATURE, vocab_size=VOCAB, tp_group=group, entropy_grad=True
                ),
                hidden_RH,
                shard,
            )
        )
    return [(logp, entropy.detach(), grads) for logp, entropy, grads in results]


def test_two_vocabulary_shards_give_the_values_and_gradients_of_one(tmp_path):
    ranks = run_two_ranks("tests.numerics.test_linear_logprob", "on_two_ranks", tmp_path)
    for number, (rows, vocab_rows) in enumerate(((13, 48), (13, 96), (0, 48))):
        hidden_RH, weight_VH, target_R = make(rows=rows, vocab_rows=vocab_rows)
        want_logp, want_entropy, want = gradients(
            lambda h, w, t=target_R: plain(h, w, t), hidden_RH, weight_VH
        )
        (logp_0, entropy_0, grads_0), (logp_1, entropy_1, grads_1) = ranks[0][number], ranks[1][number]
        assert torch.equal(logp_0, logp_1) and torch.equal(entropy_0, entropy_1)
        torch.testing.assert_close(logp_0, want_logp, atol=1e-12, rtol=0)
        torch.testing.assert_close(entropy_0, want_entropy.detach(), atol=1e-12, rtol=0)
        for grads in (grads_0, grads_1):
            torch.testing.assert_close(grads[0], want[0], atol=1e-11, rtol=0)
        torch.testing.assert_close(torch.cat([grads_0[1], grads_1[1]]), want[1], atol=1e-11, rtol=0)
