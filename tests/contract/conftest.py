"""Fixtures of the policy server contract: the embedded engine always, SGLang when SLIME_CUA_SGLANG_URL names one. And of the
providers' contract: a docker daemon and a virtual machine, where this machine has what they need.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.embedded.random_model import RandomModelSpec, write_random_model
from rollout.engines import EngineProcess
from slime_cua.config.rollout import EngineConfig
from slime_cua.config.sandbox import DesktopConfig
from tests.contract import provider_rigs, qemu_guest

SGLANG_URL = os.environ.get("SLIME_CUA_SGLANG_URL", "")
MODEL_SPEC = RandomModelSpec(
    hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, vision_hidden=32, vision_depth=1
)
ENGINE_CONFIG = EngineConfig(
    kind="embedded", dtype="fp32", max_batch=8, max_context_tokens=4096, request_timeout_s=60
)


@pytest.fixture(scope="session")
def engine_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model's folder."""
    return write_random_model(tmp_path_factory.mktemp("engine") / "model", MODEL_SPEC)


@pytest.fixture(scope="session")
def embedded_url(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An embedded engine that all tests share; each leaves it running, unpaused, with the weights of `engine_model`."""
    log = tmp_path_factory.mktemp("engine") / "shared.log"
    with EngineProcess(ENGINE_CONFIG, engine_model, log) as engine:
        yield engine.url


@pytest.fixture(scope="session", params=["embedded", *(["sglang"] if SGLANG_URL else [])])
def engine_url(request: pytest.FixtureRequest) -> str:
    """Each policy server that is there to test."""
    if request.param == "sglang":
        return SGLANG_URL
    url: str = request.getfixturevalue("embedded_url")
    return url


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[provider_rigs.Daemon]:
    """A docker daemon with an image that holds the stand-in control server."""
    if fault := provider_rigs.docker_is_missing():
        pytest.skip(fault)
    with provider_rigs.docker_daemon(tmp_path_factory.mktemp("docker")) as made:
        yield made


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> DesktopConfig:
    """The config of a tiny virtual machine with the stand-in control server."""
    if fault := qemu_guest.machine_is_missing():
        pytest.skip(fault)
    return qemu_guest.build(tmp_path_factory.mktemp("machine"))
