"""Tensors handed to another process on the same GPU, as SGLang's /update_weights_from_tensor takes them."""

from __future__ import annotations

import base64
import copyreg
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing import reductions

from slime_cua.convert.weight_stream import NamedTensor

_ALIGNMENT_BYTES = 256
_DEVICE_ARGUMENT = 6
"""Place of the device index among the arguments of torch's `rebuild_cuda_tensor`."""


def in_one_buffer(tensors: Sequence[NamedTensor], device: torch.device) -> list[NamedTensor]:
    """Copies of `tensors` on `device`, views of one allocation: one handle to map, however many tensors. Complete on return."""
    starts, size = [], 0
    for _, tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    views = []
    for (name, tensor), start in zip(tensors, starts, strict=True):
        view = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        views.append((name, view))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return views


def shared_payload(tensors: Sequence[NamedTensor]) -> str:
    """Base64 of a pickled list of (name, tensor): CUDA tensors as IPC handles, with the device's UUID in place of its index,
    which may differ in the other process; CPU tensors by value. The tensors must live until the receiver has copied them."""
    file = io.BytesIO()
    _Pickler(file).dump([(name, tensor) for name, tensor in tensors])
    return base64.b64encode(file.getvalue()).decode()


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table.copy()

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return NotImplemented
        rebuild: Callable[..., Any]
        rebuild, arguments = reductions.reduce_tensor(value)
        return rebuild, with_uuid(arguments, str(torch.cuda.get_device_properties(value.device).uuid))


def with_uuid(arguments: Sequence[Any], uuid: str) -> tuple[Any, ...]:
    """Arguments of `rebuild_cuda_tensor` with the device named by UUID."""
    if not isinstance(arguments[_DEVICE_ARGUMENT], int):
        raise TypeError(f"torch {torch.__version__} reduces CUDA tensors in another order than is known here")
    return (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
