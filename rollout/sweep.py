"""One episode each over a list of tasks, in any order of finishing: demonstrations and evaluation.

What is in the store already is not played again, so a sweep that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from slime_cua.core.errors import InfrastructureError
from slime_cua.core.types import Episode, EpisodeGroup, Task
from slime_cua.data.episodes import EpisodeStore

PlayOne = Callable[[Task, str, str], Awaitable[Episode]]
"""(task, group_id, episode_id) -> episode."""
Progress = Callable[[int, int], None]
"""(finished, of how many)."""
MAX_INVALID_IN_A_ROW = 12


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
    """The last episode of each item, in the items' order; invalid ones are tried again up to `max_retries` times.

    Stored items without an honest score are played again: what broke them may be mended since. Raises InfrastructureError
    when MAX_INVALID_IN_A_ROW items in a row end without a score.
    """
    wanted = {item.key for item in items}
    last = {group.group_id: group.episodes[-1] for group in store if group.group_id in wanted}
    found = {key: episode for key, episode in last.items() if episode.is_valid}
    row: list[Episode] = []
    waiting = [item for item in items if item.key not in found]
    queue = iter(waiting)
    progress(len(found), len(items))

    async def work() -> None:
        for item in queue:
            found[item.key] = await _play_item(item, play, store, max_retries)
            progress(len(found), len(items))
            _note_invalid(row, found[item.key])

    workers = [asyncio.create_task(work()) for _ in range(min(num_workers, len(waiting)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [found[item.key] for item in items]


def _note_invalid(row: list[Episode], episode: Episode) -> None:
    """Count items without a score in a row; so many mean that the desktops or judges are broken, not the tasks."""
    if episode.is_valid:
        row.clear()
        return
    row.append(episode)
    if len(row) >= MAX_INVALID_IN_A_ROW:
        reasons = sorted({one.error or one.stop_reason for one in row})[:3]
        raise InfrastructureError(
            f"{len(row)} episodes in a row ended without a score; the last failures were: {'; '.join(reasons)}"
        )


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
