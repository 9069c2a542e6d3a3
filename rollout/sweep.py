"""One episode each over a list of tasks, in any order of finishing: demonstrations and evaluation.

What is in the store already is not played again, so a sweep that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from slime_cua.core.types import Episode, EpisodeGroup, Task
from slime_cua.data.episodes import EpisodeStore

PlayOne = Callable[[Task, str, str], Awaitable[Episode]]
"""(task, group_id, episode_id) -> episode."""
Progress = Callable[[int, int], None]
"""(finished, of how many)."""


@dataclass(frozen=True)
class Item:
    """One episode to play: its id is the place of the item in the sweep, so that it is the same after a resume."""

    key: str
    task: Task


async def sweep(
    items: Sequence[Item],
    play: PlayOne,
    store: EpisodeStore,
    *,
    max_retries: int,
    num_workers: int,
    progress: Progress = lambda done, total: None,
) -> list[Episode]:
    """The last episode of each item, in the items' order; invalid ones are tried again up to `max_retries` times."""
    wanted = {item.key for item in items}
    found = {group.group_id: group.episodes[-1] for group in store if group.group_id in wanted}
    waiting = [item for item in items if item.key not in found]
    queue = iter(waiting)
    progress(len(found), len(items))

    async def work() -> None:
        for item in queue:
            found[item.key] = await _play_item(item, play, store, max_retries)
            progress(len(found), len(items))

    workers = [asyncio.create_task(work()) for _ in range(min(num_workers, len(waiting)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [found[item.key] for item in items]


async def _play_item(item: Item, play: PlayOne, store: EpisodeStore, max_retries: int) -> Episode:
    episodes = []
    for attempt in range(max_retries + 1):
        episodes.append(await play(item.task, item.key, f"{item.key}-e{attempt}"))
        if episodes[-1].is_valid:
            break
    store.append(
        EpisodeGroup(group_id=item.key, task_id=item.task.id, episodes=tuple(episodes), admitted_version=0)
    )
    return episodes[-1]
