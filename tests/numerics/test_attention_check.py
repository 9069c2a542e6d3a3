"""The question that is asked of an attention kernel before training: right ones pass, wrong gradients are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_patches
from megatron_patches.te_standin.attention import DotProductAttention
from slime_cua.core.errors import ConfigError
from slime_cua.trainer.attention_check import check_packed_attention, settle_packed_attention

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:Transformer Engine and Apex", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def patched() -> None:
    """As in a trainer: Megatron is imported with its patches, also for the tests that come later in this process."""
    megatron_patches.apply()


class TEDotProductAttention(torch.nn.Module):
    """Megatron's wrapper as far as the question needs it; `change` is done to query, key and value first."""

    def __init__(self, change: Any, num_groups: int = 2) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_attention_heads=4,
            num_query_groups=num_groups,
            kv_channels=32,
            tensor_model_parallel_size=1,
            context_parallel_size=1,
        )
        self._change, self._plain = change, DotProductAttention(4, 32)

    def forward(self, q: Any, k: Any, v: Any, mask: Any, attn_mask_type: Any, packed_seq_params: Any) -> Any:
        names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
        packed = {name: getattr(packed_seq_params, name) for name in names}
        return self._plain(
            *self._change(q, k, v), qkv_format="thd", attn_mask_type=attn_mask_type.name, **packed
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_a_right_kernel_passes(dtype: torch.dtype, num_groups: int):
    check_packed_attention(TEDotProductAttention(lambda *x: x, num_groups), dtype, CPU)


def test_a_right_output_with_a_gradient_that_is_lost_is_named():
    layer = TEDotProductAttention(lambda q, k, v: (q, k.detach() + 0 * k, v))
    with pytest.raises(ConfigError, match=r"gradient of keys is 1\.000 away.*NVTE_FUSED_ATTN=0"):
        check_packed_attention(torch.nn.Sequential(layer), torch.float32, CPU)


def test_a_gradient_that_is_not_a_number_is_named():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, upstream: torch.Tensor) -> torch.Tensor:
            return upstream * float("nan")

    layer = TEDotProductAttention(lambda q, k, v: (q, k, Broken.apply(v)))
    with pytest.raises(ConfigError, match="gradient of values is nan"):
        check_packed_attention(layer, torch.float32, CPU)


def test_a_wrong_kernel_is_replaced_in_every_layer(caplog: pytest.LogCaptureFixture):
    model = torch.nn.Sequential(
        *(TEDotProductAttention(lambda q, k, v: (q, k.detach() + 0 * k, v)) for _ in range(3))
    )
    settle_packed_attention(model, torch.float32, CPU)
    for layer in model:
        check_packed_attention(layer, torch.float32, CPU)
    assert "takes the place" in caplog.text and "gradient of keys" in caplog.text


@pytest.mark.parametrize("text", ["CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED", ""])
def test_a_kernel_that_fails_is_replaced(text: str, caplog: pytest.LogCaptureFixture):
    def fail(*ignored: Any) -> Any:
        raise RuntimeError(text)

    layer = TEDotProductAttention(fail)
    settle_packed_attention(layer, torch.float32, CPU)
    check_packed_attention(layer, torch.float32, CPU)
    assert f"RuntimeError: {text}" in caplog.text


def test_a_right_kernel_stays(caplog: pytest.LogCaptureFixture):
    layer = TEDotProductAttention(lambda *x: x)
    settle_packed_attention(layer, torch.float32, CPU)
    assert "forward" not in vars(layer) and not caplog.text


def test_where_the_plain_kernel_is_wrong_too_nothing_is_trained(monkeypatch: pytest.MonkeyPatch):
    wrong = TEDotProductAttention(lambda q, k, v: (q, k, v * 1.1))
    honest = DotProductAttention.forward
    monkeypatch.setattr(DotProductAttention, "forward", lambda self, *x, **o: 2 * honest(self, *x, **o))
    with pytest.raises(ConfigError, match="packed attention is wrong"):
        settle_packed_attention(wrong, torch.float32, CPU)


def test_a_model_without_such_a_layer_has_nothing_to_ask():
    check_packed_attention(torch.nn.Linear(2, 2), torch.bfloat16, CPU)
