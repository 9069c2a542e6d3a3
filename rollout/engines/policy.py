"""The policy server as an episode sees it."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.engines.client import EngineClient
from rollout.ports import Sampled
from slime_cua.config.rollout import SamplingConfig
from slime_cua.core.types import ImageRef


class EnginePolicy:
    """`rollout.ports.PolicyPort` over an EngineClient with fixed sampling parameters."""

    def __init__(self, client: EngineClient, sampling: SamplingConfig) -> None:
        self._client = client
        self._sampling = sampling

    async def generate(
        self, prompt_ids: Sequence[int], images: Sequence[tuple[ImageRef, bytes]], *, session: str
    ) -> Sampled:
        """Sample one turn. Raises EngineError."""
        generation = await self._client.generate(
            prompt_ids,
            [data for _, data in images],
            self._sampling,
            session=session,
            refs=[ref for ref, _ in images],
        )
        return Sampled(
            ids=generation.ids,
            logp=generation.logp,
            versions=generation.versions,
            finish_reason=generation.finish_reason,
            prompt_tokens=generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
            routed_experts=generation.routed_experts,
        )
