"""Engines and desktops of a replay on the running loop's clock, with how long each was busy.

An engine decodes all its requests together: with b of them each gets 1 / (decode_s + (b - 1) * decode_s_per_request)
tokens a second. Reading a prompt counts as so many tokens of the request as could be decoded meanwhile alone. While
weights are published nothing moves; then each request reads its prompt again, and so does the next of each session.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rollout.replay.scenario import SiteConfig
from rollout.replay.trace import TurnTrace


@dataclass
class Meter:
    """Integral of a number over the loop's time."""

    value: float = 0.0
    area: float = 0.0
    _at: float = 0.0

    def set(self, value: float) -> None:
        now = asyncio.get_running_loop().time()
        self.area += self.value * (now - self._at)
        self.value, self._at = value, now


@dataclass(eq=False)
class _Request:
    turn: TurnTrace
    future: asyncio.Future[dict[int, int]]
    sampled: dict[int, int] = field(default_factory=dict)
    """Tokens by version, of versions before the present one."""

    @property
    def tokens_left(self) -> int:
        return self.turn.response_tokens - sum(self.sampled.values())


class Engine:
    """One engine. `work` is the number of tokens that a request present since the start would have got."""

    def __init__(self, site: SiteConfig) -> None:
        self.site = site
        self.version = 0
        self.busy, self.occupancy = Meter(), Meter()
        self._slots = asyncio.Semaphore(site.max_batch)
        self._work, self._at = 0.0, 0.0
        self._is_paused = False
        self._requests: list[tuple[float, int, _Request]] = []
        self._serial = 0
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, turn: TurnTrace, *, knows_prompt: bool) -> dict[int, int]:
        """Sample the turn's response: tokens by the version that sampled them."""
        async with self._slots:
            future: asyncio.Future[dict[int, int]] = asyncio.get_running_loop().create_future()
            reading = self._reading(turn.new_tokens if knows_prompt else turn.prompt_tokens)
            self._advance()
            self._push(_Request(turn, future), reading + turn.response_tokens)
            self._rearm()
            try:
                return await future
            finally:
                if future.cancelled() or not future.done():
                    self._forget(future)

    def pause(self) -> None:
        """Stop; what each request has sampled so far is of the present version."""
        self._advance()
        self._is_paused = True
        self._rearm()
        for end, _, request in self._requests:
            left = min(request.tokens_left, max(0, int(end - self._work)))
            done = request.tokens_left - left
            if done:
                request.sampled[self.version] = request.sampled.get(self.version, 0) + done

    def resume(self, version: int) -> None:
        """Go on with new weights: what is under way reads its prompt and its own tokens first."""
        self._advance()
        self._is_paused, self.version = False, version
        waiting, self._requests = self._requests, []
        for _, _, request in waiting:
            seen = request.turn.prompt_tokens + sum(request.sampled.values())
            self._push(request, self._reading(seen) + request.tokens_left)
        self._rearm()

    def _reading(self, tokens: int) -> float:
        return tokens / self.site.prefill_tokens_per_s / self.site.decode_s

    def _push(self, request: _Request, work: float) -> None:
        self._serial += 1
        heapq.heappush(self._requests, (self._work + work, self._serial, request))

    def _rate(self) -> float:
        num = len(self._requests)
        return 1.0 / (self.site.decode_s + (num - 1) * self.site.decode_s_per_request)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._requests and not self._is_paused:
            self._work += (now - self._at) * self._rate()
        self._at = now

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        num = 0 if self._is_paused else len(self._requests)
        self.busy.set(float(num > 0))
        self.occupancy.set(num)
        if num:
            left = max(0.0, self._requests[0][0] - self._work) / self._rate()
            self._timer = asyncio.get_running_loop().call_later(left, self._finish)

    def _finish(self) -> None:
        self._advance()
        while self._requests and self._requests[0][0] <= self._work + 1e-6:
            request = heapq.heappop(self._requests)[2]
            if request.tokens_left:
                request.sampled[self.version] = request.sampled.get(self.version, 0) + request.tokens_left
            if not request.future.done():
                request.future.set_result(request.sampled)
        self._rearm()

    def _forget(self, future: asyncio.Future[dict[int, int]]) -> None:
        self._advance()
        self._requests = [entry for entry in self._requests if entry[2].future is not future]
        heapq.heapify(self._requests)
        self._rearm()


class Site:
    """All machines of a scenario but the trainer."""

    def __init__(self, config: SiteConfig) -> None:
        self.config = config
        self.engines = [Engine(config) for _ in range(config.num_engines)]
        self.desktops = Meter()
        self._free = asyncio.Semaphore(config.num_desktops)
        self._sessions = [0] * config.num_engines
        self._seen: dict[str, int] = {}

    @asynccontextmanager
    async def desktop(self) -> AsyncIterator[None]:
        """One desktop, in the order of asking."""
        async with self._free:
            self.desktops.set(self.desktops.value + 1)
            try:
                yield
            finally:
                self.desktops.set(self.desktops.value - 1)

    @asynccontextmanager
    async def session(self, name: str) -> AsyncIterator[Engine]:
        """The engine with the fewest episodes; an episode stays with it."""
        index = self._sessions.index(min(self._sessions))
        self._sessions[index] += 1
        try:
            yield self.engines[index]
        finally:
            self._sessions[index] -= 1
            self._seen.pop(name, None)

    async def sample(self, name: str, engine: Engine, turn: TurnTrace) -> dict[int, int]:
        """One request of a session. The engine knows the prompt so far if it sampled the last turn with these weights."""
        knows_prompt = self._seen.get(name) == engine.version
        pieces = await engine.generate(turn, knows_prompt=knows_prompt)
        self._seen[name] = engine.version
        return pieces

    async def publish(self, version: int) -> None:
        """New weights everywhere: engines stand still meanwhile, episodes go on after it."""
        for engine in self.engines:
            engine.pause()
        await asyncio.sleep(self.config.publish_s)
        for engine in self.engines:
            engine.resume(version)

    def busy_shares(self, seconds: float) -> dict[str, float]:
        """Mean shares over the replay: engines with a request, desktops leased; and the mean batch of an engine."""
        for engine in self.engines:
            engine.busy.set(engine.busy.value)
            engine.occupancy.set(engine.occupancy.value)
        self.desktops.set(self.desktops.value)
        return {
            "engines": _mean([engine.busy.area for engine in self.engines]) / seconds,
            "engine_batch": _mean([engine.occupancy.area for engine in self.engines]) / seconds,
            "desktops": self.desktops.area / seconds / self.config.num_desktops,
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
