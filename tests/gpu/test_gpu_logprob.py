"""The CUDA head on a GPU: the same cases as in the interpreter, without it; two GPUs over NCCL where there are two."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(ROOT / "tests/numerics/triton_cases.py"), *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_head_equals_float64_on_one_gpu():
    with run() as process:
        output, _ = process.communicate(timeout=240)
    assert output.strip().endswith("ok"), output[-3000:]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="fewer than two GPUs"
)
def test_head_equals_float64_over_two_gpus():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = [run(str(rank), "2", port) for rank in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=240)
        assert output.strip().endswith("ok"), output[-3000:]
