"""The host's warm pool: slots that fail again and again are set aside, and nothing boots below the floors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandbox_cluster.errors import ApiError
from sandbox_cluster.host.pool import QUARANTINE_AFTER, Pool
from sandbox_cluster.providers.fake import FakeProvider
from slime_cua.config.sandbox import DesktopConfig
from tests.contract.gateway_rig import eventually


@asynccontextmanager
async def pool_of(
    folder: Path, num_spares: int, **options: float
) -> AsyncIterator[tuple[Pool, FakeProvider]]:
    provider = FakeProvider(DesktopConfig(screen_wh_px=(64, 64)), folder, "pool")
    pool = Pool(provider, 1 - num_spares, num_spares, disk=folder, **options)
    pool.start()
    try:
        yield pool, provider
    finally:
        await pool.close()


async def test_a_slot_whose_desktops_boot_and_end_unused_is_set_aside(tmp_path: Path) -> None:
    async with pool_of(tmp_path, 1, health_interval_s=0.05) as (pool, provider):
        for _ in range(QUARANTINE_AFTER):
            await eventually(lambda: pool.num_ready == 1, 20.0)
            await provider.drivers[0].kill()
            await eventually(lambda: pool.num_ready == 0, 20.0)
        await asyncio.sleep(1.5)
        assert pool.num_ready == 0 and "slot 0 ended before it was used" in pool.last_error


async def test_a_slot_whose_desktops_end_in_use_is_not_set_aside(tmp_path: Path) -> None:
    async with pool_of(tmp_path, 1, health_interval_s=0.05) as (pool, provider):
        for _ in range(QUARANTINE_AFTER + 1):
            watched = await pool.take(20.0)
            await provider.drivers[0].kill()
            pool.give_back(watched)


@pytest.mark.parametrize(
    ("floor", "why"),
    [
        ({"min_free_disk_bytes": 1 << 60}, "are free in"),
        ({"min_free_memory_bytes": 1 << 60}, "of memory are available"),
    ],
)
async def test_nothing_boots_below_a_floor_and_the_answer_says_which(
    tmp_path: Path, floor: dict[str, int], why: str
) -> None:
    async with pool_of(tmp_path, 0, **floor) as (pool, provider):
        with pytest.raises(ApiError, match=f"no desktop was ready.*{why}"):
            await pool.take(0.3)
        assert provider.drivers == {}
