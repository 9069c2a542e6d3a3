"""Shares of use, integrated over time."""

import asyncio

from rollout.player import Busy, WatchedPolicy
from rollout.ports import Sampled


class Slow:
    async def generate(self, prompt_ids, images, *, session):
        await asyncio.sleep(0.2)
        return Sampled((1,), (0.0,), (0,), "stop")


async def test_overlapping_requests_count_once_and_idle_time_not_at_all():
    busy = Busy(1)
    policy = WatchedPolicy(Slow(), busy)
    await asyncio.gather(policy.generate([1], [], session="a"), policy.generate([1], [], session="b"))
    await asyncio.sleep(0.2)
    assert 0.3 < busy.take() < 0.7
    await asyncio.sleep(0.05)
    assert busy.take() == 0.0


def test_shares_are_of_the_capacity():
    busy = Busy(4)
    busy.add(2)
    assert 0.0 <= busy.take() <= 0.5
