"""Engines die, hang and miss updates; the fleet's traffic never meets old weights, and nothing outlives its owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from rollout.engines import EngineFleet, EngineProcess, HealthRule
from slime_cua.config.rollout import EngineConfig
from slime_cua.core.errors import EngineError
from slime_cua.trainer.publisher import DiskPublisher
from tests.contract.conftest import ENGINE_CONFIG
from tests.contract.engine_requests import generate, text_ids

RULE = HealthRule(interval_s=0.2, timeout_s=0.5, window=4, max_misses=3)


def wait_for(condition: Callable[[], bool], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Exists and is not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_killed_or_frozen_engine_comes_back_with_the_current_weights(
    engine_model: Path, tmp_path: Path
) -> None:
    config = ENGINE_CONFIG.model_copy(update={"num_engines": 2})
    changes: list[tuple[tuple[str, ...], int]] = []
    fleet = EngineFleet.local(
        config, engine_model, tmp_path, rule=RULE, on_change=lambda urls, version: changes.append((urls, version))
    )  # fmt: skip
    with fleet:
        publisher = DiskPublisher(tmp_path / "weights")
        weights = load_file(engine_model / "model.safetensors")
        report = publisher.publish(weights.items(), 5, fleet.reachable())
        fleet.published(5, report.engines, report.folder)
        assert len(fleet.serving()) == 2
        for number in (signal.SIGKILL, signal.SIGSTOP):
            victim = fleet.handles[0]
            os.kill(victim.pid, number)
            wait_for(lambda: len(fleet.serving()) == 1)
            wait_for(lambda: len(fleet.serving()) == 2)
            for url in fleet.serving():
                assert generate(url, text_ids(0, 5))["meta_info"]["weight_version"] == "5"
        assert fleet.restarts() == 2
        assert ((fleet.serving()), 5) == changes[-1]
        pids = [handle.pid for handle in fleet.handles]
    assert not any(map(is_alive, pids))


def test_an_engine_that_missed_a_publish_serves_nothing_until_it_has_the_weights(
    engine_model: Path, tmp_path: Path
) -> None:
    config = ENGINE_CONFIG.model_copy(update={"num_engines": 1})
    with EngineFleet.local(config, engine_model, tmp_path, rule=RULE) as fleet:
        (url,) = fleet.serving()
        fleet.published(1, [])
        assert fleet.serving() == () and fleet.reachable() == fleet.stale() == (url,)
        report = DiskPublisher(tmp_path / "weights").publish(
            load_file(engine_model / "model.safetensors").items(), 1, fleet.stale()
        )
        fleet.published(1, report.engines)
        assert fleet.serving() == (url,)


def test_a_fleet_stops_at_once_also_while_an_engine_restarts(engine_model: Path, tmp_path: Path) -> None:
    with EngineFleet.local(ENGINE_CONFIG, engine_model, tmp_path, rule=RULE) as fleet:
        (handle,) = fleet.handles
        os.kill(handle.pid, signal.SIGKILL)
        wait_for(lambda: fleet.restarts() == 1)
        began = time.monotonic()
    assert time.monotonic() - began < 15
    assert not handle.is_running


def test_an_engine_dies_with_its_owner(engine_model: Path, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from rollout.engines import EngineProcess;"
            "from slime_cua.config.rollout import EngineConfig;"
            "engine = EngineProcess(EngineConfig(kind='embedded', dtype='fp32'), Path(sys.argv[1]), Path(sys.argv[2]));"
            "engine.start(); print(engine.pid, engine.url, flush=True); time.sleep(600)",
            str(engine_model),
            str(tmp_path / "engine.log"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    pid, url = owner.stdout.readline().split()
    assert httpx.get(f"{url}/health").status_code == 200
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: not is_alive(int(pid)), 10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None], ids=["kill", "term", "stdin"])
def test_a_guarded_command_dies_with_its_guardian(number: signal.Signals | None, tmp_path: Path) -> None:
    """What SGLang runs under."""
    script = "import os, time; open(os.environ['PID_FILE'], 'w').write(str(os.getpid())); time.sleep(600)"
    pid_file = tmp_path / "pid"
    guardian = subprocess.Popen(
        [sys.executable, "-m", "rollout.engines.lifeline", "--", sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        env={**os.environ, "PID_FILE": str(pid_file)},
    )
    wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
    pid = int(pid_file.read_text())
    assert guardian.stdin is not None
    if number is None:
        guardian.stdin.close()
    else:
        guardian.send_signal(number)
        guardian.stdin.close()
    guardian.wait(timeout=15)
    wait_for(lambda: not is_alive(pid), 10)


def start_and_fail(model: Path, tmp_path: Path, *extra: str) -> str:
    """What a server that cannot start tells its owner."""
    config = EngineConfig(kind="embedded", dtype="fp32", start_timeout_s=60, extra_args=extra)
    with pytest.raises(EngineError) as caught:
        EngineProcess(config, model, tmp_path / "engine.log").start()
    return str(caught.value)


def test_a_server_without_a_model_folder_says_so(tmp_path: Path) -> None:
    assert "config.json does not exist" in start_and_fail(tmp_path / "nowhere", tmp_path)


def test_a_server_refuses_another_architecture_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "'gpt2' is not served" in start_and_fail(tmp_path, tmp_path)


def test_a_server_names_the_port_that_is_in_use(engine_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in start_and_fail(
            engine_model, tmp_path, f"--port={port}"
        )
