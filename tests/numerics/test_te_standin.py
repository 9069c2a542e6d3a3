"""The Transformer Engine stand-in against float64 formulas written out in loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_patches.fla_standin import causal_conv1d, l2norm
from megatron_patches.te_standin.attention import DotProductAttention, _long
from megatron_patches.te_standin.linear import GroupedLinear, LayerNormLinear, Linear
from megatron_patches.te_standin.norm import LayerNorm, RMSNorm
from megatron_patches.te_standin.support import fp8_autocast

HEADS, GROUPS, WIDTH = 4, 2, 8


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: Any) -> torch.Tensor:
    """[L, N, D] by the definition; keep(i, j) says whether query i sees key j."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for head in range(q.shape[1]):
        group = head * k.shape[1] // q.shape[1]
        for i in range(q.shape[0]):
            seen = [j for j in range(k.shape[0]) if keep(i, j)]
            scores = torch.stack([q[i, head] @ k[j, group] for j in seen]) / math.sqrt(q.shape[2])
            weights = scores.softmax(0)
            out[i, head] = sum(w * v[j, group] for w, j in zip(weights, seen, strict=True))
    return out


def packed(lengths: list[int], pads: int = 0) -> tuple[Any, dict[str, Any]]:
    total = sum(lengths) + pads * len(lengths)
    q, k, v = (rand(total, n, WIDTH, seed=s) for s, n in enumerate((HEADS, GROUPS, GROUPS)))
    real = torch.tensor([0, *lengths]).cumsum(0).int()
    padded = torch.tensor([0, *(n + pads for n in lengths)]).cumsum(0).int()
    options = {
        "cu_seqlens_q": real,
        "cu_seqlens_kv": real,
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
    }
    options |= {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    if pads:
        options |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    return (q, k, v), options


@pytest.mark.parametrize("lengths", [[5, 5, 5], [3, 7, 1], [6]], ids=["equal", "ragged", "one"])
def test_packed_sequences_attend_causally_inside_themselves_only(lengths: list[int]) -> None:
    (q, k, v), options = packed(lengths)
    found = DotProductAttention(HEADS, WIDTH)(q, k, v, **options).view(-1, HEADS, WIDTH)
    at = 0
    for n in lengths:
        part = slice(at, at + n)
        wanted = slow_attention(q[part], k[part], v[part], lambda i, j: j <= i)
        torch.testing.assert_close(found[part], wanted, atol=1e-12, rtol=0)
        at += n


def test_long_sequences_one_by_one_give_what_packed_ones_give() -> None:
    """The way that CUDA takes where sequences are long."""
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(300, n, 32, generator=drawn, requires_grad=True) for n in (4, 2, 2))
    ends = torch.tensor([0, 100, 300], dtype=torch.int32)
    whole = DotProductAttention(4, 32, softmax_scale=0.3)(
        q,
        k,
        v,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=200,
        max_seqlen_kv=200,
    )
    assert whole.shape == (300, 128)
    torch.testing.assert_close(_long(q, k, v, [100, 200], True, 0.3), whole, atol=1e-6, rtol=1e-6)


def test_rows_of_padded_packs_are_zero_and_the_others_as_without_padding() -> None:
    (q, k, v), options = packed([3, 4], pads=2)
    found = DotProductAttention(HEADS, WIDTH)(q, k, v, **options).view(-1, HEADS, WIDTH)
    for start, n in ((0, 3), (5, 4)):
        part = slice(start, start + n)
        wanted = slow_attention(q[part], k[part], v[part], lambda i, j: j <= i)
        torch.testing.assert_close(found[part], wanted, atol=1e-12, rtol=0)
        assert found[start + n : start + n + 2].abs().max() == 0


@pytest.mark.parametrize(
    "options, keep",
    [
        ({"attn_mask_type": "causal"}, lambda i, j: j <= i),
        ({"attn_mask_type": "no_mask"}, lambda i, j: True),
        ({"attn_mask_type": "causal", "window_size": (2, 0)}, lambda i, j: i - 2 <= j <= i),
        ({"attn_mask_type": "no_mask", "window_size": (1, 1)}, lambda i, j: abs(i - j) <= 1),
    ],
    ids=["causal", "full", "causal window", "symmetric window"],
)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_masks_and_windows_are_those_of_the_definition(
    options: dict[str, Any], keep: Any, layout: str
) -> None:
    q, k, v = (rand(6, n, WIDTH, seed=s) for s, n in enumerate((HEADS, GROUPS, GROUPS)))
    batch_dim = 1 if layout == "sbhd" else 0
    found = DotProductAttention(HEADS, WIDTH)(
        *(x.unsqueeze(batch_dim) for x in (q, k, v)), qkv_format=layout, **options
    )
    wanted = slow_attention(q, k, v, keep).flatten(1)
    torch.testing.assert_close(found.squeeze(batch_dim), wanted, atol=1e-12, rtol=0)


def test_an_arbitrary_mask_hides_where_it_is_true() -> None:
    q, k, v = (rand(4, n, WIDTH, seed=s) for s, n in enumerate((HEADS, GROUPS, GROUPS)))
    hidden = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1], [0, 1, 0, 0]]).bool()
    found = DotProductAttention(HEADS, WIDTH)(
        *(x[:, None] for x in (q, k, v)), attention_mask=hidden[None, None], attn_mask_type="arbitrary"
    )
    wanted = slow_attention(q, k, v, lambda i, j: not hidden[i, j]).flatten(1)
    torch.testing.assert_close(found[:, 0], wanted, atol=1e-12, rtol=0)


def test_what_only_the_real_package_does_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="softmax_type='learnable' needs the real"):
        DotProductAttention(HEADS, WIDTH, softmax_type="learnable")
    with pytest.raises(NotImplementedError, match="fp8"), fp8_autocast(enabled=True):
        pass


@pytest.mark.parametrize("is_zero_centered", [False, True])
def test_norms_are_the_formulas(is_zero_centered: bool) -> None:
    x = rand(3, 16).float()
    gain, shift = rand(16, seed=1).float(), rand(16, seed=2).float()
    factor = gain + 1 if is_zero_centered else gain
    options: dict[str, Any] = {"eps": 1e-5, "zero_centered_gamma": is_zero_centered, "device": "cpu"}
    rms, layer = RMSNorm(16, **options), LayerNorm(16, **options)
    rms.weight.data, layer.weight.data = gain.clone(), gain.clone()
    assert layer.bias is not None
    layer.bias.data = shift.clone()
    centred = x - x.mean(-1, keepdim=True)
    wanted_rms = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * factor
    wanted_layer = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * factor + shift
    torch.testing.assert_close(rms(x), wanted_rms, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer(x), wanted_layer, atol=1e-5, rtol=1e-5)


def test_fused_norm_and_linear_is_norm_then_linear() -> None:
    options: dict[str, Any] = {
        "params_dtype": torch.float64,
        "init_method": torch.nn.init.normal_,
        "device": "cpu",
    }
    fused = LayerNormLinear(16, 6, normalization="RMSNorm", return_bias=True, **options)
    plain, norm = Linear(16, 6, **options), RMSNorm(16, eps=1e-5, params_dtype=torch.float64, device="cpu")
    plain.weight.data = fused.weight.data
    x = rand(3, 16)
    y, bias = fused(x)
    torch.testing.assert_close(y, plain(norm(x)), atol=1e-6, rtol=0)
    assert bias is fused.bias and bias.shape == (6,)


def test_grouped_linear_sends_each_row_to_its_expert() -> None:
    layer = GroupedLinear(
        3, 8, 5, bias=False, params_dtype=torch.float64, init_method=torch.nn.init.normal_, device="cpu"
    )
    x = rand(7, 8)
    experts = [0, 0, 2, 2, 2, 2, 2]
    wanted = torch.stack([x[i] @ getattr(layer, f"weight{e}").T for i, e in enumerate(experts)])
    torch.testing.assert_close(layer(x, [2, 0, 5]), wanted, atol=1e-12, rtol=0)


def test_a_linear_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="column linear of 6 features does not divide over tp_size 4"):
        Linear(8, 6, parallel_mode="column", tp_size=4, device="cpu")


def test_convolution_never_looks_into_the_sequence_before() -> None:
    x, weight, bias = rand(1, 7, 3), rand(3, 4, seed=1), rand(3, seed=2)
    found, _ = causal_conv1d(x, weight, bias, cu_seqlens=torch.tensor([0, 3, 7]))
    for start, end in ((0, 3), (3, 7)):
        for t in range(start, end):
            for channel in range(3):
                past = [x[0, t - 3 + i, channel] * weight[channel, i] for i in range(4) if t - 3 + i >= start]
                assert found[0, t, channel] == pytest.approx(float(sum(past) + bias[channel]))


def test_l2norm_gives_unit_length() -> None:
    torch.testing.assert_close(
        l2norm(rand(4, 9)).norm(dim=-1), torch.ones(4, dtype=torch.float64), atol=1e-5, rtol=0
    )
