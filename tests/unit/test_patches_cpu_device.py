"""Inside cpu_scope 'cuda' means the CPU; outside, torch is untouched."""

from __future__ import annotations

import pytest
import torch

from megatron_patches.cpu_device import CudaMeansCpu, cpu_scope

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the scope does nothing with a CUDA device")


def test_factories_and_moves_land_on_the_cpu() -> None:
    with cpu_scope():
        made = torch.zeros(2, device="cuda")
        moved = made.to("cuda:0").to(torch.device("cuda"), torch.float64).cuda()
    assert made.device.type == "cpu"
    assert moved.device.type == "cpu" and moved.dtype == torch.float64


def test_types_are_spelled_as_megatron_compares_them() -> None:
    x = torch.zeros(1)
    with CudaMeansCpu():
        assert x.type() == "torch.cuda.FloatTensor"
    assert x.type() == "torch.FloatTensor"


def test_outside_the_scope_a_cuda_device_is_still_an_error() -> None:
    with cpu_scope():
        torch.zeros(1, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_gradients_flow_through_moves() -> None:
    with cpu_scope():
        x = torch.ones(3, requires_grad=True)
        (x.to("cuda") * 2).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2, 2]
