"""A trainer of several ranks on this machine without Ray: spawned processes, the same methods as TrainerRank."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NoReturn

from slime_cua.config.trainer import TrainerConfig
from slime_cua.core.errors import InfrastructureError, SlimeCuaError
from slime_cua.core.ports import free_port


class LocalTrainerGroup:
    """Starts config.parallel.world_size ranks and calls them together.

    Example:
        with LocalTrainerGroup(config) as trainer:
            trainer.call("load", "models/tiny")
            metrics = trainer.call("train_step", samples, store, "sft")

    Every call has the deadline config.timeout_s. A rank that dies, or a deadline, ends the group with InfrastructureError.
    """

    def __init__(self, config: TrainerConfig, seed: int = 0, start_timeout_s: float = 180.0) -> None:
        self.config = config
        self.world_size = config.parallel.world_size
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, config, rank, self.world_size, port, seed)
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"trainer-rank-{rank}")
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect(start_timeout_s, "start")

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """TrainerRank.method(*args, **kwargs) on every rank; rank 0's answer. An error of ours comes back as itself."""
        return self.call_all(method, *args, **kwargs)[0]

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The answers of all ranks, in order. An iterator comes back as a list."""
        message = pickle.dumps((method, args, kwargs))
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                self._fail(rank, method)
        return self._collect(self.config.timeout_s, method)

    def close(self) -> None:
        """End the processes: asked first, then terminated, then killed."""
        for pipe in self._pipes:
            try:
                pipe.send_bytes(pickle.dumps(("close", (), {})))
            except OSError:
                continue
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.terminate()
                process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def __enter__(self) -> LocalTrainerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fail(self, rank: int, what: str) -> NoReturn:
        """A rank is gone: end the others, which would wait for it."""
        self.close()
        raise InfrastructureError(f"trainer rank {rank} died in {what}; its output says why") from None

    def _collect(self, timeout_s: float, what: str) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise InfrastructureError(
                        f"trainer rank {rank} did not finish {what} in {timeout_s:.0f} s"
                    )
                answers.append(pickle.loads(pipe.recv_bytes()))
            except (EOFError, OSError):
                self._fail(rank, what)
            except InfrastructureError:
                self.close()
                raise
        failures = [error for error, _ in answers if error is not None]
        if failures:
            raise failures[0]
        return [answer for _, answer in answers]


def _serve(pipe: Connection, config: TrainerConfig, rank: int, world_size: int, port: int, seed: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_RANK"] = str(rank)
    trainer: Any = None

    def run(method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        nonlocal trainer
        if trainer is None:
            from slime_cua.trainer.rank import TrainerRank

            trainer = TrainerRank(config, rank, world_size, "127.0.0.1", port, seed)
            return None
        answer = getattr(trainer, method)(*args, **kwargs)
        return list(answer) if hasattr(answer, "__next__") else answer

    _answer(pipe, run, "start", (), {})
    while True:
        try:
            method, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        _answer(pipe, run, method, args, kwargs)
        if method == "close":
            return


def _answer(pipe: Connection, run: Any, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Run, and send (None, answer) or (error, None). A foreign error travels as text: it may not pickle."""
    error: BaseException | None = None
    answer = None
    try:
        answer = run(method, args, kwargs)
    except SlimeCuaError as ours:
        error = ours
    except Exception:
        error = InfrastructureError(f"trainer rank failed in {method}:\n{traceback.format_exc()}")
    try:
        pipe.send_bytes(pickle.dumps((error, answer)))
    except OSError:
        return
