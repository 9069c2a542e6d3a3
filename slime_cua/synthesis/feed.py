"""Worker processes that make batches ahead of the training, in memory shared with it.

Batch b stands in slot b % num_slots. It is made of chunks; chunk c of batch b is drawn from the seed (seed, b, c) by the worker
whose turn it is, so the stream of batches depends on seed and plan alone, whatever the number of workers.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from slime_cua.core.errors import InfrastructureError
from slime_cua.synthesis.pretrain_data import Batch, Shape

POLL_S = 0.001
FillChunk = Callable[[np.random.Generator, int, Batch], None]
"""(random generator, plan number, chunk to fill)."""


class Feed:
    """Batches in order, made ahead by forked workers. Create it before CUDA is touched; close it at the end.

    shapes: sizes of a batch for each plan number, which `open_batch` chooses batch by batch. fill: draws a chunk.
    num_chunks must divide the sequences of every shape.
    """

    def __init__(
        self,
        shapes: list[Shape],
        fill: FillChunk,
        num_workers: int,
        num_chunks: int,
        seed: tuple[int, ...],
        first_batch: int = 0,
        num_slots: int = 4,
        wait_s: float = 120.0,
    ) -> None:
        if any(shape.num_sequences % num_chunks for shape in shapes):
            raise ValueError(f"num_chunks {num_chunks} must divide the sequences of a batch")
        self._shapes, self._fill, self._seed, self._wait_s = shapes, fill, seed, wait_s
        self._num_workers, self._num_chunks, self._num_slots = num_workers, num_chunks, num_slots
        self._slot_bytes = max(sum(_sizes(shape).values()) for shape in shapes)
        self.memory = mmap.mmap(-1, num_slots * self._slot_bytes)
        """Anonymous memory shared with the workers; pin it to copy from it without waiting."""
        context: Any = multiprocessing.get_context("fork")
        self._opened = context.RawValue("q", first_batch)
        self._plans = context.RawArray("q", num_slots)
        self._done = context.RawArray("q", num_slots * num_chunks)
        self._next = first_batch
        self._workers: list[BaseProcess] = [
            context.Process(target=self._work, args=(number, first_batch), daemon=True)
            for number in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    @property
    def num_open(self) -> int:
        """Batches opened and not yet taken."""
        return int(self._opened.value) - self._next

    def open_batch(self, plan: int) -> None:
        """Let the workers make the next batch in the shape `plan`. The slot of the oldest taken batch is used again."""
        if self.num_open >= self._num_slots:
            raise ValueError(f"all {self._num_slots} slots hold batches that were not taken")
        batch = int(self._opened.value)
        self._plans[batch % self._num_slots] = plan
        self._opened.value = batch + 1

    def take(self) -> tuple[int, Batch]:
        """(plan, batch) of the next batch: views that stay valid until its slot is opened again.

        Raises InfrastructureError when a worker died or the batch does not come in time.
        """
        slot = self._next % self._num_slots
        deadline = time.monotonic() + self._wait_s
        while any(self._done[slot * self._num_chunks + c] != self._next + 1 for c in range(self._num_chunks)):
            dead = [worker.exitcode for worker in self._workers if not worker.is_alive()]
            if dead or time.monotonic() > deadline:
                why = f"a worker ended with {dead[0]}" if dead else f"nothing within {self._wait_s} s"
                raise InfrastructureError(f"no batch {self._next} of generated screens: {why}")
            time.sleep(POLL_S)
        self._next += 1
        plan = int(self._plans[slot])
        return plan, self._views(slot, self._shapes[plan])

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join(5)

    def _views(self, slot: int, shape: Shape) -> Batch:
        arrays: dict[str, np.ndarray] = {}
        at = slot * self._slot_bytes
        sizes = _sizes(shape)
        for name, (dims, kind) in shape.arrays().items():
            arrays[name] = np.frombuffer(self.memory, kind, int(np.prod(dims)), at).reshape(dims)
            at += sizes[name]
        return Batch(**arrays)

    def _work(self, number: int, first_batch: int) -> None:
        parent = os.getppid()
        turn = number
        while True:
            batch, chunk = first_batch + turn // self._num_chunks, turn % self._num_chunks
            while batch >= self._opened.value:
                if os.getppid() != parent:
                    return
                time.sleep(POLL_S)
            slot = batch % self._num_slots
            plan = int(self._plans[slot])
            whole = self._views(slot, self._shapes[plan])
            self._fill(np.random.default_rng([*self._seed, batch, chunk]), plan, self._part(whole, chunk))
            self._done[slot * self._num_chunks + chunk] = batch + 1
            turn += self._num_workers

    def _part(self, whole: Batch, chunk: int) -> Batch:
        rows, images = (
            slice(chunk * len(x) // self._num_chunks, (chunk + 1) * len(x) // self._num_chunks)
            for x in (whole.token_ids_BL, whole.pixels)
        )
        return Batch(
            whole.token_ids_BL[rows], whole.positions_3BL[:, rows], whole.kind_BL[rows], whole.pixels[images]
        )


def _sizes(shape: Shape) -> dict[str, int]:
    """Bytes of each array, rounded up to 64."""
    return {
        name: -(-int(np.prod(dims)) * np.dtype(kind).itemsize // 64) * 64
        for name, (dims, kind) in shape.arrays().items()
    }
