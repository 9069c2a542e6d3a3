"""OSWorld's own client drives a leased desktop through the gateway, unmodified.

It lives in an environment of its own, which SLIME_CUA_OSWORLD_PYTHON names:

    python -m venv .venvs/osworld
    .venvs/osworld/bin/pip install --no-deps desktop-env==1.0.2
    .venvs/osworld/bin/pip install requests requests_toolbelt
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from sandbox_cluster.client import SandboxClient
from sandbox_cluster.cluster import LocalCluster
from slime_cua.config.sandbox import SandboxConfig

PYTHON = os.environ.get("SLIME_CUA_OSWORLD_PYTHON", "")
PROGRAM = Path(__file__).with_name("osworld_program.py")
CONFIG = SandboxConfig(
    provider="local", num_desktops=1, num_spares=0, screen_wh_px=(640, 384), maximise=True, boot_timeout_s=120
)

pytestmark = [
    pytest.mark.desktop,
    pytest.mark.skipif(not PYTHON, reason="SLIME_CUA_OSWORLD_PYTHON names no environment with desktop-env"),
]


async def test_osworlds_controllers_work_through_the_gateway(tmp_path: Path) -> None:
    async with (
        LocalCluster(CONFIG, tmp_path) as cluster,
        SandboxClient(cluster.url, cluster.token, CONFIG) as client,
    ):
        async with client.lease(key="osworld") as sandbox:
            address, port = cluster.url.removeprefix("http://").split(":")
            done = await in_its_environment(address, port + sandbox.osworld_path)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    assert result["set_up"] is True and result["screenshot"] == "89504e470d0a1a0a"
    assert result["size"] == {"width": 640, "height": 384} and result["platform"] == "Linux"
    assert result["note"].split() == ["from", "the", "host", "typed"] and result["width"] == "640\n"
    assert result["python"]["output"] == "42\n" and result["python"]["return_code"] == 0
    assert result["bash"]["output"] == "out\n" and result["bash"]["returncode"] == 3


async def in_its_environment(address: str, port: str) -> subprocess.CompletedProcess[str]:
    import asyncio

    return await asyncio.to_thread(
        lambda: subprocess.run(
            [PYTHON, str(PROGRAM), address, port], capture_output=True, text=True, timeout=120, check=False
        )
    )
