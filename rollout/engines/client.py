"""Ask a policy server for the next tokens of a session.

A generation changes nothing in the world, so a request that failed is sent again, to another engine. One that an update
aborted keeps what it has, stamped with the version that sampled it, and goes on as a new request (prompt + partial ids).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np

from rollout.engines.routing import Breakers, rendezvous_order
from slime_cua.config.rollout import SamplingConfig
from slime_cua.core.errors import EngineError, PromptMismatchError
from slime_cua.core.routing import RoutedExperts, join
from slime_cua.core.types import ImageRef
from slime_cua.data.expand import ImageProcessorConfig, expand_image_placeholders

_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 2.0
_ABORTED_UNSTARTED = 499
"""SGLang's status for a request that a pause aborted before the scheduler had it: while it waited or its images were read."""

NEUTRAL: dict[str, float] = {
    "top_p": 1.0,
    "top_k": -1,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sent with every request, so that no default of a server's (`--preferred-sampling-params`) trains another policy."""


@dataclass(frozen=True)
class Generation:
    """Sampled tokens of one turn. `ids`, `logp`, `versions` are as long as each other."""

    ids: tuple[int, ...]
    logp: tuple[float, ...]
    """Log-probs under the sampling distribution."""
    versions: tuple[int, ...]
    """Policy version that sampled each id."""
    finish_reason: str
    """`stop` or `length`."""
    prompt_tokens: int
    """As the engine counts: images expanded. Asserted equal to our own count."""
    cached_tokens: int
    """Prompt tokens that the engine did not compute again."""
    num_pieces: int = 1
    """Requests that the turn took: one more for each update it spans."""
    routed_experts: RoutedExperts | None = None
    """Of prompt (images expanded) and ids but the last; only from an engine of a mixture of experts that records them."""


@dataclass
class _Draft:
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    num_pieces: int = 0
    routed: list[RoutedExperts] = field(default_factory=list)


class EngineFailure(EngineError):
    """This engine failed this time; another one, or the same one later, may not."""


class EngineClient:
    """A client of all engines of a run.

    Example: async with EngineClient(urls, processor, request_timeout_s=600) as client:
                 generation = await client.generate(ids, [png], SamplingConfig(temperature=0.7), session="episode-3")
    """

    def __init__(
        self,
        urls: Sequence[str],
        processor: ImageProcessorConfig,
        *,
        request_timeout_s: float,
        never_sampled: Sequence[int] = (),
        breakers: Breakers | None = None,
        routing_shape: tuple[int, int] | None = None,
    ) -> None:
        """`never_sampled`: further token ids that end a response besides the image placeholder (a video placeholder):
        a response that holds one could not be a prompt again. `routing_shape`: (layers, experts a token) of a mixture of
        experts whose routing the engines must report."""
        self._routing_shape = routing_shape
        self._urls = tuple(urls)
        self._min_version = 0
        self._processor = processor
        self._timeout_s = request_timeout_s
        self._breakers = breakers or Breakers()
        self._stop_ids = sorted({processor.image_token_id, *never_sampled})
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=30)
        self._http = httpx.AsyncClient(limits=limits, timeout=None)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def without_placeholder(self, answer: Generation) -> Generation:
        """`answer` before a placeholder that it sampled: with it, it could not be a prompt, nor trained on."""
        if not answer.ids or answer.ids[-1] not in self._stop_ids:
            return answer
        return replace(
            answer,
            ids=answer.ids[:-1],
            logp=answer.logp[:-1],
            versions=answer.versions[:-1],
            routed_experts=None,
        )

    def set_engines(self, urls: Sequence[str], min_version: int) -> None:
        """From now on use `urls`; an answer sampled by an older version than `min_version` is not taken."""
        self._urls = tuple(urls)
        self._min_version = min_version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        images: Sequence[bytes],
        sampling: SamplingConfig,
        *,
        session: str = "",
        refs: Sequence[ImageRef] | None = None,
        max_new_tokens: int | None = None,
        seed: int | None = None,
    ) -> Generation:
        """Sample until a stop or `max_new_tokens` (default: sampling.max_response_tokens).

        `prompt_ids`: rollout ids, one placeholder an image; `images`: PNG bytes in the placeholders' order; `session`:
        requests of one session go to one engine while it lives; `refs`: what `images` are, else read from the bytes.
        Raises EngineError when the deadline passes or an engine refuses the request, PromptMismatchError when an engine
        counts the prompt otherwise than we do.
        """
        refs = refs if refs is not None else [image_ref(image) for image in images]
        num_expected = len(expand_image_placeholders(prompt_ids, refs, self._processor))
        budget = max_new_tokens if max_new_tokens is not None else sampling.max_response_tokens
        encoded = [base64.b64encode(image).decode() for image in images]
        num_image_tokens = num_expected - len(prompt_ids) + len(refs)
        draft = _Draft()
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    body = self._body(
                        prompt_ids, encoded, sampling, draft, budget - len(draft.ids), session, seed
                    )
                    meta = await self._ask(body, session)
                    try:
                        reason = self._read(
                            meta, draft, num_expected + len(draft.ids), num_image_tokens, budget
                        )
                    except (LookupError, TypeError, ValueError) as error:
                        raise EngineError(f"an engine answered against the contract: {error!r}") from error
                    if reason != "abort":
                        break
                    await asyncio.sleep(_MIN_BACKOFF_S)
        except TimeoutError:
            raise EngineError(
                f"no engine finished the request of session {session!r} in {self._timeout_s} s "
                f"({len(draft.ids)} tokens were sampled); engines: {', '.join(self._urls) or 'none'}"
            ) from None
        return Generation(
            tuple(draft.ids),
            tuple(draft.logp),
            tuple(draft.versions),
            reason,
            num_expected,
            draft.cached_tokens,
            draft.num_pieces,
            join(draft.routed),
        )

    def _read(
        self, meta: dict[str, Any], draft: _Draft, num_expected: int, num_image_tokens: int, budget: int
    ) -> str:
        """Add one answer to `draft`; its finish reason."""
        if not _is_unstarted(meta):
            _check_prompt(meta, num_expected, num_image_tokens)
        if draft.num_pieces == 0:
            draft.cached_tokens = int(meta.get("cached_tokens", 0))
        if self._routing_shape is not None and not _is_unstarted(meta):
            draft.routed.append(_routed_experts(meta, self._routing_shape))
        return _take(draft, meta, budget)

    def _body(
        self,
        prompt_ids: Sequence[int],
        images: list[str],
        sampling: SamplingConfig,
        draft: _Draft,
        max_new_tokens: int,
        session: str,
        seed: int | None,
    ) -> dict[str, Any]:
        params: dict[str, Any] = {
            **NEUTRAL,
            "temperature": sampling.temperature,
            "max_new_tokens": max_new_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": self._stop_ids,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if seed is not None:
            params["sampling_seed"] = seed
        body: dict[str, Any] = {
            "input_ids": [*prompt_ids, *draft.ids],
            "sampling_params": params,
            "return_logprob": True,
        }
        if self._routing_shape is not None:
            body["return_routed_experts"] = True
        if images:
            body["image_data"] = images
        if session:
            body["routing_key"] = session
        return body

    async def _ask(self, body: dict[str, Any], session: str) -> dict[str, Any]:
        """meta_info of the first answer that can be taken; goes from engine to engine until the caller's deadline."""
        backoff_s = _MIN_BACKOFF_S
        tried: set[str] = set()
        while True:
            order = rendezvous_order(session, self._urls)
            if order:
                fresh = [url for url in order if url not in tried] or order
                url = self._breakers.choose(fresh)
                try:
                    meta = await self._post(url, body)
                    self._breakers.succeeded(url)
                    return meta
                except EngineFailure:
                    self._breakers.failed(url)
                    tried.add(url)
            if tried.issuperset(self._urls):
                tried.clear()
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        min_version = self._min_version
        try:
            response = await self._http.post(f"{url}/generate", json=body)
        except httpx.HTTPError as error:
            raise EngineFailure(f"{url}: {type(error).__name__} {error}") from error
        if response.status_code == _ABORTED_UNSTARTED:
            return {"finish_reason": {"type": "abort"}, "completion_tokens": 0, "weight_version": min_version}
        if 400 <= response.status_code < 500 and response.status_code not in (404, 408, 429):
            raise EngineError(f"{url} refuses the request: {response.text[:500]}")
        if response.status_code != 200:
            raise EngineFailure(f"{url} answered {response.status_code}: {response.text[:500]}")
        try:
            meta: dict[str, Any] = response.json()["meta_info"]
            version = int(meta["weight_version"])
            meta["finish_reason"]["type"]
        except (ValueError, KeyError, TypeError) as error:
            raise EngineFailure(f"{url} answered against the contract: {error!r}") from error
        if version < min_version:
            raise EngineFailure(f"{url} still serves version {version}, current is {min_version}")
        return meta


def image_ref(png: bytes) -> ImageRef:
    """Hash and size of PNG bytes, the size read from the header. Raises ValueError when they are not a PNG."""
    if png[:8] != b"\x89PNG\r\n\x1a\n" or len(png) < 24:
        raise ValueError("the image is not a PNG")
    width, height = struct.unpack(">II", png[16:24])
    return ImageRef(sha256=hashlib.sha256(png).hexdigest(), width_px=width, height_px=height)


def _routed_experts(meta: dict[str, Any], shape: tuple[int, int]) -> RoutedExperts:
    """As SGLang gives them: base64 of int32 [tokens - 1, layers, experts a token]."""
    encoded = meta.get("routed_experts")
    if not isinstance(encoded, str):
        raise EngineError(
            "the engine reports no routed_experts: for SGLang add --enable-return-routed-experts to "
            "rollout.engine.extra_args, or set rollout.engine.records_routing = false"
        )
    flat = np.frombuffer(base64.b64decode(encoded), dtype="<i4")
    num_tokens = int(meta["prompt_tokens"]) + int(meta["completion_tokens"]) - 1
    if flat.size != num_tokens * shape[0] * shape[1]:
        raise EngineError(
            f"the engine reports {flat.size} routed experts for {num_tokens} tokens of {shape[0]} layers and {shape[1]} "
            "experts a token: it runs another model"
        )
    return RoutedExperts.from_array(flat.reshape(num_tokens, *shape))


def _is_unstarted(meta: dict[str, Any]) -> bool:
    """Aborted before a token: nothing is known of the prompt then (SGLang's waiting queue gives no prompt_tokens)."""
    return bool(meta["finish_reason"]["type"] == "abort" and not meta.get("completion_tokens"))


def _check_prompt(meta: dict[str, Any], num_expected: int, num_image_tokens: int) -> None:
    if meta["prompt_tokens"] != num_expected:
        raise PromptMismatchError(
            f"the engine counts {meta['prompt_tokens']} prompt tokens, we sent {num_expected} (images expanded): "
            "it tokenises again or sees other images; for SGLang set SGLANG_MM_AVOID_RETOKENIZE=1"
        )
    seen = meta.get("image_tokens")
    if seen is not None and int(seen) != num_image_tokens:
        raise PromptMismatchError(f"the engine saw {seen} image tokens, we sent {num_image_tokens}")


def _take(draft: _Draft, meta: dict[str, Any], budget: int) -> str:
    """Add one answer's tokens to `draft`; its finish reason."""
    triples = meta.get("output_token_logprobs") or []
    version = int(meta["weight_version"])
    if len(triples) != meta["completion_tokens"]:
        raise EngineError(f"{meta['completion_tokens']} tokens came with {len(triples)} log-probs")
    logp = [float(triple[0]) for triple in triples]
    if not all(map(math.isfinite, logp)):
        raise EngineError("a log-prob is not a number: the engine's weights or kernels are broken")
    draft.ids.extend(int(triple[1]) for triple in triples)
    draft.logp.extend(logp)
    draft.versions.extend([version] * len(triples))
    draft.num_pieces += bool(triples)
    reason = str(meta["finish_reason"]["type"])
    return "length" if reason == "abort" and len(draft.ids) >= budget else reason
