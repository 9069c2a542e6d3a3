"""The load of `bench_rollout.py`: episodes side by side, and the same requests statelessly.

An episode has one new screenshot a turn, and each turn's prompt is the whole episode so far, as a context policy that only
extends sends it. Statelessly: in any order, each behind a few ids of its own, so that no prompt starts with what the server
has seen. Counts tokens a second and the share of prompt tokens that were not computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from bench_engine import screenshot_png

from rollout.engines.client import EngineClient, image_ref
from slime_cua.config.rollout import SamplingConfig
from slime_cua.convert import read_config
from slime_cua.core.types import ImageRef
from slime_cua.data.expand import ImageProcessorConfig

TURN_TEXT_TOKENS = 32
"""Instruction, tool response and generation prompt around one screenshot."""
OWN_IDS = 8
"""Ids that make a stateless request's prompt unlike any other."""


@dataclass(frozen=True)
class Request:
    """One turn as it was sent."""

    ids: tuple[int, ...]
    images: tuple[bytes, ...]
    refs: tuple[ImageRef, ...]
    session: str


@dataclass
class Tally:
    """What a phase did before it ended or its time was over."""

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    num_failed: int = 0
    first_error: str = ""

    def report(self) -> dict[str, float | str]:
        """The counts and the rates, per second of the phase."""
        seconds = max(self.seconds, 1e-9)
        return asdict(self) | {
            "requests_per_s": self.num_requests / seconds,
            "output_tokens_per_s": self.output_tokens / seconds,
            "served_tokens_per_s": (self.prompt_tokens + self.output_tokens) / seconds,
            "cached_share": self.cached_tokens / max(self.prompt_tokens, 1),
        }


class Load:
    """Sends requests and counts."""

    def __init__(self, client: EngineClient, new_tokens: int) -> None:
        self._client = client
        self._sampling = SamplingConfig(temperature=1.0, max_response_tokens=new_tokens)
        self.tally = Tally()

    async def ask(self, request: Request) -> tuple[int, ...]:
        """The sampled ids."""
        tally = self.tally
        try:
            got = await self._client.generate(
                request.ids, request.images, self._sampling, session=request.session, refs=request.refs
            )
        except Exception as error:
            tally.num_failed += 1
            tally.first_error = tally.first_error or f"{type(error).__name__}: {error}"[:300]
            raise
        tally.num_requests += 1
        tally.prompt_tokens += got.prompt_tokens
        tally.cached_tokens += got.cached_tokens
        tally.output_tokens += len(got.ids)
        return got.ids


async def run_for(seconds: float, tally: Tally, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run all of `work` side by side, for at most `seconds`."""
    began = time.monotonic()
    tasks = [asyncio.ensure_future(job()) for job in work]
    _, late = await asyncio.wait(tasks, timeout=seconds)
    tally.seconds = time.monotonic() - began
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def episode(
    load: Load, name: str, turns: Sequence[bytes], shown: Sequence[int], sent: list[Request]
) -> None:
    """One episode; the requests that were answered are added to `sent`. shown: an image in a prompt, placeholder and marks."""
    rng = np.random.default_rng(int.from_bytes(name.encode()[-4:], "big"))
    ids: tuple[int, ...] = ()
    images: tuple[bytes, ...] = ()
    refs: tuple[ImageRef, ...] = ()
    for png in turns:
        ids += (*rng.integers(24, 264, TURN_TEXT_TOKENS - len(shown)).tolist(), *shown, 30)
        images, refs = (*images, png), (*refs, image_ref(png))
        request = Request(ids, images, refs, name)
        ids += tuple(token for token in await load.ask(request) if token not in shown)
        sent.append(request)


async def measure(url: str, model: Path, options: argparse.Namespace) -> dict[str, object]:
    """Both phases, after one warm-up episode (kernels that are compiled at first use)."""
    processor = ImageProcessorConfig.from_hf(model)
    config = read_config(model)
    shown = [config[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")]
    width, height = (int(side) for side in options.size.split("x"))
    seeds = [[1000 * e + t for t in range(options.turns)] for e in range(options.episodes + 1)]
    with ThreadPoolExecutor() as pool:
        draw = partial(screenshot_png, width=width, height=height)
        pngs = [list(pool.map(draw, row)) for row in seeds]
    sent: list[Request] = []
    async with EngineClient([url], processor, request_timeout_s=options.timeout_s) as client:
        async with asyncio.timeout(options.timeout_s):
            await episode(Load(client, options.new_tokens), "warm", pngs.pop(), shown, [])
        sticky = Load(client, options.new_tokens)
        await run_for(
            options.seconds,
            sticky.tally,
            [
                lambda e=e, turns=turns: episode(sticky, f"episode-{e:04d}", turns, shown, sent)
                for e, turns in enumerate(pngs)
            ],
        )
        random.Random(0).shuffle(sent)
        stateless = Load(client, options.new_tokens)
        pending = list(enumerate(sent))

        async def one_after_another() -> None:
            while pending:
                index, request = pending.pop()
                own = np.random.default_rng(10_000 + index).integers(24, 264, OWN_IDS).tolist()
                await stateless.ask(Request((*own, *request.ids), request.images, request.refs, f"s{index}"))

        await run_for(options.seconds, stateless.tally, [one_after_another] * options.episodes)
    first, second = sticky.tally.report(), stateless.tally.report()
    ratios = {
        key: float(first[key]) / max(float(second[key]), 1e-9)
        for key in ("requests_per_s", "served_tokens_per_s")
    }
    settings = {key: getattr(options, key) for key in ("episodes", "turns", "size", "new_tokens", "seconds")}
    return {"settings": settings, "sticky": first, "stateless": second, "ratio": ratios}
