"""Processes for ranks, forked from a server that has imported Megatron: fresh interpreters spend longer on that than ranks compute.

The server has no thread and no process group. Where there is CUDA, ranks are spawned: it does not survive a fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch


def rank_context() -> Any:
    """The multiprocessing context whose processes are such ranks."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.numerics.preloaded"])
    return context


@contextlib.contextmanager
def warm_groups() -> Iterator[None]:
    """The ranks of a LocalTrainerGroup that is started in this block are such processes, too."""
    context, real = rank_context(), multiprocessing.get_context
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            multiprocessing, "get_context", lambda method=None: context if method == "spawn" else real(method)
        )
        yield


def run_together(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]], timeout_s: float) -> None:
    """`target(*arguments[n])` in a process each, at the same time.

    AssertionError with the traceback of the first that fails, or at the deadline; the others are ended.
    """
    context = rank_context()
    waiting: dict[Connection, Any] = {}
    processes = []
    for values in arguments:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_tell, args=(theirs, target, values), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        waiting[ours] = process
    end = time.monotonic() + timeout_s
    try:
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, end - time.monotonic()))
            assert ready, (
                f"{len(waiting)} of {len(processes)} did not finish {target.__name__} in {timeout_s:.0f} s"
            )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                fault = _told(pipe)
                assert fault is None, fault
                del waiting[pipe]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _tell(pipe: Connection, target: Callable[..., None], values: tuple[Any, ...]) -> None:
    fault = None
    try:
        target(*values)
    except BaseException:
        fault = traceback.format_exc()
    pipe.send(fault)


def _told(pipe: Connection) -> str | None:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        return "a rank died; its output says why"
