"""A group: G attempts at one task. Infrastructure failures are replaced up to a bound; siblings go on meanwhile.

A group that was interrupted goes on with the episodes that had finished: they are kept, the others are played again.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from slime_cua.core.types import Episode, EpisodeGroup

RunEpisode = Callable[[str], Awaitable[Episode]]
"""episode_id -> finished episode."""


@dataclass
class ClosingRule:
    """When a group ends before all its attempts have: over-sampling and early close (both favour short attempts)."""

    num_wanted: int
    num_extra: int = 0
    """Attempts beyond num_wanted; enough valid ones end the group."""
    factor: float = 0.0
    """Once half of num_wanted are valid, the rest has until `factor` times their median duration; 0: no limit."""
    valid_after_s: list[float] = field(default_factory=list)
    """Seconds from the group's start to the end of each valid attempt."""

    def is_enough(self) -> bool:
        return self.num_extra > 0 and len(self.valid_after_s) >= self.num_wanted

    def left_s(self, elapsed_s: float) -> float | None:
        """How long the group may still wait; None without a limit."""
        if self.factor <= 0 or 2 * len(self.valid_after_s) < self.num_wanted:
            return None
        return max(0.0, self.factor * statistics.median(self.valid_after_s) - elapsed_s)


async def run_group(
    run_episode: RunEpisode,
    *,
    group_id: str,
    task_id: str,
    num_episodes: int,
    max_retries: int,
    admitted_version: int,
    num_extra: int = 0,
    close_factor: float = 0.0,
    finished: Sequence[Episode] = (),
) -> EpisodeGroup:
    """The group with all its attempts, invalid and cancelled ones included (they are counted, never trained).

    At most `max_retries` invalid attempts are replaced, over the whole group. `num_extra` and `close_factor` as in
    ClosingRule; what is cut off has stop_reason "cancelled". Cancelling cancels every attempt.
    finished: attempts of this group that ended before an interruption, in the order in which they did.
    """
    episodes: list[Episode] = list(finished)
    num_replaced = min(max_retries, sum(not episode.is_valid for episode in finished))
    retries, serial = max_retries - num_replaced, num_episodes + num_extra + num_replaced
    known = {episode.episode_id for episode in finished}
    names = [name for n in range(serial) if (name := f"{group_id}-e{n}") not in known]
    running = {asyncio.ensure_future(run_episode(name)): name for name in names}
    took_s = sorted(episode.ended_s - episode.started_s for episode in finished if episode.is_valid)
    rule = ClosingRule(num_episodes, num_extra, close_factor, took_s)
    clock = asyncio.get_running_loop().time
    started, started_s = clock() - max(took_s, default=0.0), time.time()
    try:
        while running and not rule.is_enough():
            timeout = rule.left_s(clock() - started)
            done, _ = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                del running[future]
                episode = future.result()
                episodes.append(episode)
                if episode.is_valid:
                    rule.valid_after_s.append(clock() - started)
                elif retries > 0:
                    retries -= 1
                    name, serial = f"{group_id}-e{serial}", serial + 1
                    running[asyncio.ensure_future(run_episode(name))] = name
    finally:
        for future in running:
            future.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    episodes += [_cut_off(name, group_id, task_id, started_s, clock() - started) for name in running.values()]
    episodes.sort(key=lambda episode: int(episode.episode_id.rsplit("-e", 1)[1]))
    return EpisodeGroup(
        group_id=group_id, task_id=task_id, episodes=tuple(episodes), admitted_version=admitted_version
    )


def _cut_off(episode_id: str, group_id: str, task_id: str, started_s: float, took_s: float) -> Episode:
    return Episode(
        episode_id=episode_id,
        group_id=group_id,
        task_id=task_id,
        turns=(),
        stop_reason="cancelled",
        started_s=started_s,
        ended_s=started_s + took_s,
    )
