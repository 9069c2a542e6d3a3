"""A group: G attempts at one task. Infrastructure failures are replaced up to a bound; siblings go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from slime_cua.core.types import Episode, EpisodeGroup

RunEpisode = Callable[[str], Awaitable[Episode]]
"""episode_id -> finished episode."""


async def run_group(
    run_episode: RunEpisode,
    *,
    group_id: str,
    task_id: str,
    num_episodes: int,
    max_retries: int,
    admitted_version: int,
) -> EpisodeGroup:
    """The group with all its attempts, invalid ones included (they are counted, never trained).

    At most `max_retries` invalid attempts are replaced, over the whole group. Cancelling cancels every attempt.
    """
    episodes: list[Episode] = []
    retries = max_retries
    serial = num_episodes
    running = {asyncio.ensure_future(run_episode(f"{group_id}-e{n}")) for n in range(num_episodes)}
    try:
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                episode = future.result()
                episodes.append(episode)
                if not episode.is_valid and retries > 0:
                    retries -= 1
                    running.add(asyncio.ensure_future(run_episode(f"{group_id}-e{serial}")))
                    serial += 1
    finally:
        for future in running:
            future.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    episodes.sort(key=lambda episode: int(episode.episode_id.rsplit("-e", 1)[1]))
    return EpisodeGroup(
        group_id=group_id, task_id=task_id, episodes=tuple(episodes), admitted_version=admitted_version
    )
