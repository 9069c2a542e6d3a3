"""Gateway and host as processes: readiness, crashes, ends, and sentences for what cannot start."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandbox_cluster.client import SandboxClient
from sandbox_cluster.cluster import LocalCluster
from slime_cua.config.sandbox import SandboxConfig
from slime_cua.core.errors import PreflightError, SandboxError

CONFIG = SandboxConfig(
    provider="fake", num_desktops=2, num_spares=1, screen_wh_px=(320, 200), settle_max_ms=0, settle_quiet_ms=0
)
TOKENS = {"SLIME_CUA_CLIENT_TOKENS": "run:a", "SLIME_CUA_HOST_TOKENS": "run:b"}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def wait_gone(pids: list[int], timeout_s: float = 15.0) -> None:
    end = time.monotonic() + timeout_s
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [pid for pid in pids if is_running(pid)]


async def test_a_cluster_serves_and_leaves_no_process_behind(tmp_path: Path) -> None:
    async with LocalCluster(CONFIG, tmp_path) as cluster:
        assert cluster.gateway and cluster.host
        pids = [cluster.gateway.process.pid, cluster.host.process.pid]
        for pid in pids:
            assert cluster.token not in command_line(pid)
        async with SandboxClient(cluster.url, cluster.token, CONFIG) as client:
            async with client.lease(key="k") as sandbox:
                assert (await sandbox.step([])).png
    wait_gone(pids, 0.0)


async def test_leases_outlive_kill_9_of_the_gateway(tmp_path: Path) -> None:
    async with LocalCluster(CONFIG, tmp_path) as cluster:
        assert cluster.gateway
        async with SandboxClient(cluster.url, cluster.token, CONFIG) as client:
            async with client.lease(key="k") as sandbox:
                first = await sandbox.step([], "a")
                cluster.gateway.process.kill()
                cluster.gateway.process.wait()
                with pytest.raises(SandboxError, match=r"cannot be reached|reply was lost"):
                    await sandbox.step([], "b")
                await asyncio.to_thread(cluster.start_gateway, cluster.gateway.port)
                assert (await sandbox.step([], "a")).is_replay
                assert (await sandbox.step([], "c")).png == first.png
            async with client.lease(key="k2") as other, client.lease(key="k3"):
                assert other.lease.host_id == sandbox.lease.host_id


def test_kill_9_of_the_parent_ends_gateway_and_host(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from sandbox_cluster.cluster import LocalCluster; from slime_cua.config.sandbox import SandboxConfig\n"
        "cluster = LocalCluster(SandboxConfig(provider='fake', num_desktops=1, screen_wh_px=(320, 200)), Path(sys.argv[1]))\n"
        "cluster.start()\n"
        "print(cluster.gateway.process.pid, cluster.host.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(is_running(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_gone(pids)


async def test_sigterm_lets_leases_end_before_the_host_does(tmp_path: Path) -> None:
    async with LocalCluster(CONFIG, tmp_path) as cluster:
        assert cluster.host
        async with SandboxClient(cluster.url, cluster.token, CONFIG) as client:
            async with client.lease(key="k") as sandbox:
                cluster.host.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(1.0)
                assert (await sandbox.step([])).png
                with pytest.raises(SandboxError, match="draining"):
                    async with client.lease(key="other", timeout_s=0.5):
                        pass
            assert await asyncio.to_thread(cluster.host.process.wait, 60) == 0


def gateway(
    *arguments: str, environment: dict[str, str] | None = None, **more: object
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-m", "sandbox_cluster.gateway", *arguments],
        env={**os.environ, **(TOKENS if environment is None else environment)},
        capture_output=True,
        text=True,
        timeout=300,
        **more,
    )


def test_a_taken_port_is_a_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = gateway("--port", str(port), "--state", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        f"sandbox gateway: port {port} on 127.0.0.1 is in use: stop"
    )


def test_missing_tokens_are_a_sentence(tmp_path: Path) -> None:
    done = gateway(
        "--port",
        "0",
        "--state",
        str(tmp_path),
        environment={"SLIME_CUA_CLIENT_TOKENS": "", "SLIME_CUA_HOST_TOKENS": ""},
    )
    assert done.returncode == 2 and "SLIME_CUA_CLIENT_TOKENS holds no token" in done.stderr


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    def no_space() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    read_end, write_end = os.pipe()
    done = subprocess.run(
        [sys.executable, "-m", "sandbox_cluster.gateway", "--port", "0", "--state", str(tmp_path / "state")],
        env={**os.environ, **TOKENS},
        stdout=subprocess.PIPE,
        stderr=write_end,
        timeout=300,
        preexec_fn=no_space,
    )
    os.close(write_end)
    with os.fdopen(read_end) as said:
        text = said.read()
    assert done.returncode == 2 and "cannot keep its state" in text and "free space there" in text


def test_two_gateways_do_not_share_a_state_folder(tmp_path: Path) -> None:
    from sandbox_cluster.gateway.state import State

    state = State(tmp_path)
    done = gateway("--port", "0", "--state", str(tmp_path))
    state.close()
    assert done.returncode == 2 and "another gateway keeps its state" in done.stderr


async def test_a_second_host_with_the_same_state_does_not_touch_the_first_ones_desktops(
    tmp_path: Path,
) -> None:
    """It would take them for those of an earlier life of itself, and end them."""
    async with LocalCluster(CONFIG, tmp_path) as cluster:
        first = cluster.host
        assert first is not None
        async with (
            SandboxClient(cluster.url, cluster.token, CONFIG) as client,
            client.lease(key="k") as sandbox,
        ):
            with pytest.raises(PreflightError, match=r"another host keeps its state in .*--state"):
                await asyncio.to_thread(cluster.start_host)
            cluster.host = first
            assert first.process.poll() is None
            assert (await sandbox.screenshot()).png


def test_an_unknown_provider_is_a_sentence_with_the_known_ones(tmp_path: Path) -> None:
    bad = CONFIG.model_copy(update={"provider": "nothing"})
    cluster = LocalCluster(bad, tmp_path)
    with pytest.raises(PreflightError, match="provider"):
        cluster.start()
    assert cluster.gateway is not None
    wait_gone([cluster.gateway.process.pid], 0.0)


def test_a_host_with_a_wrong_token_says_so(tmp_path: Path) -> None:
    cluster = LocalCluster(CONFIG, tmp_path)
    cluster.start()
    try:
        assert cluster.gateway
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "sandbox_cluster.host",
                "--gateway",
                cluster.url,
                "--provider",
                "fake",
                "--host-id",
                "stranger",
                "--state",
                str(tmp_path / "stranger"),
                "--screen",
                "320x200",
            ],
            env={**os.environ, "SLIME_CUA_HOST_TOKENS": "x:wrong"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        cluster.stop()
    assert done.returncode == 2 and "does not know this host's token" in done.stderr
