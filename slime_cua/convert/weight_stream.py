"""Weights on their way from trainer to engines: digests both sides agree on, buckets, and the broadcast group.

Used by the trainer's publisher and by the embedded engine, which must not import each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

NamedTensor = tuple[str, Tensor]
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_WORDS = 1 << 24


def tensor_digest(tensor: Tensor) -> str:
    """Dtype, shape and two sums over the tensor's words w_i: sum w_i and sum (i + 1) w_i, both modulo 2^64.

    Equal for bit-equal tensors on any device, computed where the tensor is, at memory speed: made against lost, swapped
    and half-written data, not against an adversary. Source: Fletcher's checksum (IEEE Trans. Comm. 30, 1982), wide words.
    """
    words = tensor.detach().contiguous().reshape(-1).view(_WORDS[tensor.itemsize])
    plain = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weighted = plain.clone()
    for start in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + chunk.numel(), device=tensor.device)
        plain += chunk.sum()
        weighted += (chunk * place).sum()
    mask = (1 << 64) - 1
    head = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
    return f"{head}:{int(plain) & mask:016x}{int(weighted) & mask:016x}"


def combined_digest(digests: Mapping[str, str]) -> str:
    """One digest (hex) of many named ones, in any order."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """As SGLang writes it, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype called `name`. Raises ValueError for anything that is not one."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype, e.g. float32 or bfloat16")
    return dtype


def buckets(tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[list[NamedTensor]]:
    """Consecutive tensors whose bytes sum to at most `max_bytes`; a larger one is alone."""
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


class WeightGroup:
    """A process group of its own, beside whatever groups the process has: rank 0 sends weights, the others receive.

    The rendezvous is SGLang's: a TCP store at the sender, its keys prefixed by the group's name.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    @classmethod
    def join(
        cls, address: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> WeightGroup:
        """Blocks until all `world_size` members have come. Raises RuntimeError (torch's kinds) at the deadline."""
        # torch offers no public way to make a group outside the default one.
        from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout)
        group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            dist.PrefixStore(name, store),
            group_name=GroupName(name),
            timeout=timeout,
        )
        _world.pg_group_ranks[group] = {index: index for index in range(world_size)}
        return cls(group)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Send (rank 0) or receive (others) in order, in place."""
        works = [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in tensors]
        for work in works:
            if work is not None:
                work.wait()

    def close(self) -> None:
        """Leave the group. A second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
