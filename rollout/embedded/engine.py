"""The engine: one thread that owns the model and runs all requests together, a step at a time.

Requests join and leave the running batch between steps. A step takes one token from every decoding request and a bounded
number of prompt tokens from the requests that are still being read. Whatever changes weights, cache or admission runs on
the same thread between two steps, so no token is ever sampled in the middle of a change.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import numpy as np

from rollout.embedded.model import EngineModel, StepPart
from rollout.embedded.prefix import PrefixPool, Sequence
from rollout.embedded.prompt import common_prefix
from rollout.embedded.request import Finished, Request
from rollout.embedded.sampling import RowSampling, sample

log = logging.getLogger(__name__)
PauseMode = Literal["abort", "in_place"]
T = TypeVar("T")
_MIN_SHARED_TOKENS = 64
"""A waiting request holds back for a prefix that is being computed if it saves at least so many tokens."""


class Engine:
    """Continuous batching over an EngineModel.

    Example: engine = Engine(model, max_batch=16); engine.start(); engine.submit(request) -> request.on_finish(Finished)
    """

    def __init__(
        self,
        model: EngineModel,
        *,
        max_batch: int = 64,
        max_prefill_tokens: int = 1024,
        max_cached_tokens: int = 65536,
        weight_version: str = "default",
    ) -> None:
        self.model = model
        self.weight_version = weight_version
        self.is_dirty = False
        """Some weights were replaced and no version was set since: nothing is generated."""
        self.paused: PauseMode | None = None
        self.num_generated = 0
        self._max_batch = max_batch
        self._max_prefill_tokens = max_prefill_tokens
        self._pool = PrefixPool(model.kv_shape, max_cached_tokens)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Abort what runs and end the thread."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(timeout=10)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def max_batch(self) -> int:
        return self._max_batch

    @property
    def num_cached_tokens(self) -> int:
        return self._pool.num_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; `request.on_finish` is called from the engine's thread."""
        with self._wake:
            self._waiting.append(request)
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine's thread between two steps."""
        future: Future[T] = Future()
        with self._wake:
            self._commands.append((function, future))
            self._wake.notify()
        return future

    # Below: only on the engine's thread (through `call`).

    def pause(self, mode: PauseMode) -> None:
        """Stop generating. `abort` ends all requests with what they have; `in_place` keeps them."""
        self.paused = mode
        if mode == "abort":
            self.abort(None, "paused")

    def resume(self) -> None:
        """Generate again. Raises ValueError while the weights are half replaced."""
        if self.is_dirty:
            raise ValueError(
                "weights were replaced but no version was set: finish the update and call /update_weight_version, "
                "or restart the engine"
            )
        self.paused = None

    def abort(self, rid: str | None, message: str) -> int:
        """End the request `rid`, or all, with partial output. Returns how many ended."""
        with self._wake:
            candidates = [*self._running, *self._waiting]
        chosen = [request for request in candidates if rid is None or request.rid == rid]
        for request in chosen:
            self._finish(request, {"type": "abort", "message": message})
        return len(chosen)

    def flush(self) -> None:
        """Empty the prefix cache. Raises ValueError while requests run."""
        if self._running:
            raise ValueError(f"cannot flush the cache while {len(self._running)} requests run: pause first")
        self._pool.clear()

    def weights_changed(self, is_vision_changed: bool) -> None:
        """Drop what old weights made."""
        assert not self._running
        self.is_dirty = True
        self._pool.clear()
        if is_vision_changed:
            self.model.vision_generation += 1

    def set_version(self, version: str) -> None:
        """Name the weights that are loaded now."""
        if self._running:
            raise ValueError(
                f"cannot change the version while {len(self._running)} requests run: pause first"
            )
        self.weight_version = version
        self.is_dirty = False

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._is_stopping or self._commands or self._has_work()):
                    self._wake.wait()
                if self._is_stopping:
                    break
                commands, self._commands = self._commands, deque()
            for function, future in commands:
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
            if self._has_work():
                self._step_guarded()
        self.abort(None, "the engine is shutting down")

    def _has_work(self) -> bool:
        return self.paused is None and not self.is_dirty and bool(self._waiting or self._running)

    def _step_guarded(self) -> None:
        try:
            self._admit()
            self._step()
        except Exception as error:
            log.exception("a step failed; its requests end with the error")
            for request in list(self._running):
                self._running.remove(request)
                request.kv = None
                request.on_finish(RuntimeError(f"the engine's step failed: {error!r}"))

    def _admit(self) -> None:
        with self._wake:
            waiting = list(self._waiting)
        for request in waiting:
            if len(self._running) >= self._max_batch:
                return
            if any(self._is_worth_waiting_for(request, reader) for reader in self._running):
                continue
            with self._wake:
                self._waiting.remove(request)
            running = [Sequence(r.kv, r.keys()) for r in self._running if r.kv is not None]
            request.kv, request.cached_tokens = self._pool.acquire(request.prompt.keys_N, running)
            self._running.append(request)

    def _is_worth_waiting_for(self, request: Request, reader: Request) -> bool:
        """`reader` is still being read and will soon hold a prefix that `request` can copy."""
        if reader.kv is None or reader.kv.length >= reader.num_prompt or self.model.kv_shape.is_recurrent:
            return False
        shared = common_prefix(request.prompt.keys_N, reader.prompt.keys_N)
        return shared >= max(reader.kv.length + _MIN_SHARED_TOKENS, request.num_prompt // 2)

    def _step(self) -> None:
        parts: list[StepPart] = []
        members: list[Request] = []
        budget = self._max_prefill_tokens
        for request in self._running:
            assert request.kv is not None
            num_unread = request.num_prompt - request.kv.length
            if num_unread <= 0:
                parts.append(self._decode_part(request))
            elif budget > 0:
                parts.append(self._prefill_part(request, min(num_unread, budget)))
                budget -= len(parts[-1].ids)
            else:
                continue
            members.append(request)
        logits = self.model.step(parts)
        ready = [i for i, r in enumerate(members) if r.kv is not None and r.kv.length >= r.num_prompt]
        if ready:
            self._sample([members[i] for i in ready], logits[ready])

    def _decode_part(self, request: Request) -> StepPart:
        assert request.kv is not None
        place = len(request.output_ids) - 1
        position = np.full((3, 1), request.prompt.next_position + place, dtype=np.int64)
        return StepPart(request.kv, np.array([request.output_ids[place]], dtype=np.int64), position)

    def _prefill_part(self, request: Request, count: int) -> StepPart:
        assert request.kv is not None
        start = request.kv.length
        prompt = request.prompt
        images = []
        for span in prompt.spans:
            if span.start < start + count and span.start + span.length > start:
                features = self.model.features(request.images[span.index])
                images.append((max(span.start - start, 0), max(start - span.start, 0), features))
        window = slice(start, start + count)
        return StepPart(request.kv, prompt.ids_N[window], prompt.positions_3N[:, window], images)

    def _sample(self, requests: list[Request], logits: Any) -> None:
        rows = [
            RowSampling(
                r.sampling.temperature,
                r.sampling.top_p,
                r.sampling.top_k,
                r.sampling.seed,
                r.num_prompt + len(r.output_ids),
            )
            for r in requests
        ]
        ids, logp = sample(logits, rows)
        for request, token, value in zip(requests, ids.tolist(), logp.tolist(), strict=True):
            request.output_ids.append(token)
            request.output_logp.append(value)
            self.num_generated += 1
            reason = self._finish_reason(request, token)
            if reason is not None:
                self._finish(request, reason)

    def _finish_reason(self, request: Request, token: int) -> dict[str, Any] | None:
        sampling = request.sampling
        if not sampling.ignore_eos and (token in sampling.stop_token_ids or token in self.model.stop_ids):
            return {"type": "stop", "matched": token}
        matched = request.match_stop(self.model.decode_tail(request.output_ids, request.tail, sampling.stop))
        if matched is not None:
            return {"type": "stop", "matched": matched}
        if len(request.output_ids) >= sampling.max_new_tokens:
            return {"type": "length", "length": sampling.max_new_tokens}
        return None

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        if request in self._running:
            self._running.remove(request)
        else:
            with self._wake:
                self._waiting.remove(request)
        routed = None
        if request.kv is not None:
            routed = np.concatenate(request.kv.routed) if request.kv.routed else None
            self._pool.release(request.kv, request.keys())
            request.kv = None
        request.on_finish(
            Finished(
                request.output_ids,
                request.output_logp,
                reason,
                request.cached_tokens,
                self.weight_version,
                routed,
            )
        )
