"""The Triton head against float64: in Triton's interpreter where there is no GPU (tests/gpu runs the same on one)."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRITON = ROOT / ".venvs" / "triton"
"""Triton for the interpreter; kept out of .venv, where megatron runs without it. scripts/env.sh installs it."""
has_triton = TRITON.is_dir() or importlib.util.find_spec("triton") is not None


def run(*arguments: str) -> subprocess.Popen:
    paths = [str(ROOT), str(TRITON)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(ROOT / "tests/numerics/triton_cases.py"), *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.skipif(not has_triton, reason="Triton is not installed: run scripts/test.sh")
def test_triton_head_equals_float64_on_one_rank():
    with run() as process:
        output, _ = process.communicate(timeout=240)
    assert output.strip().endswith("ok"), output[-3000:]


@pytest.mark.skipif(not has_triton, reason="Triton is not installed: run scripts/test.sh")
def test_triton_head_equals_float64_over_two_vocabulary_shards():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = [run(str(rank), "2", port) for rank in range(2)]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for output in outputs:
        assert output.strip().endswith("ok"), output[-3000:]
