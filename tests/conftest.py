"""What all tests share: no property fails because the machine is slow, and the collector does not walk what imports made."""

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from slime_cua.core.startup import heavy_imports

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Test files import torch, transformers and Megatron while they are collected."""
    with heavy_imports():
        return (yield)
