"""Where ranks come from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.numerics.warm_ranks import warm_groups


@pytest.fixture(scope="module", autouse=True)
def warm_starts() -> Iterator[None]:
    """Trainer groups of a module do not import Megatron anew. test_trainer_group has them start as users do."""
    with warm_groups():
        yield
