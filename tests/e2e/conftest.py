"""Real local desktops for a test; all are ended after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.local import LocalProvider
from tests.e2e.local_rig import config


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., LocalProvider]]:
    made: list[LocalProvider] = []

    def build(max_boots: int = 2, **changes: object) -> LocalProvider:
        made.append(
            LocalProvider(config(**changes), tmp_path / str(len(made)), f"e2e-{len(made)}", max_boots)
        )
        return made[-1]

    yield build
    for provider in made:
        await provider.close()


@pytest.fixture
async def desktop(make: Callable[..., LocalProvider]) -> Desktop:
    return await make().boot(0)
