"""The training benchmark meets itself where nobody listens, and does not stand still unseen."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import bench_train  # type: ignore[import-not-found]

    yield bench_train


def test_two_benchmarks_side_by_side_without_a_launcher_have_ports_of_their_own(bench: ModuleType) -> None:
    first = bench.this_job({})
    with socket.socket() as listening:
        listening.bind((first.address, first.port))
        second = bench.this_job({})
        assert second.port != first.port
        with socket.socket() as other:
            other.bind((second.address, second.port))
    assert (first.rank, first.world_size) == (0, 1)


def test_a_launchers_port_is_its_stores_and_the_next_one_ours(bench: ModuleType) -> None:
    job = bench.this_job({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"})
    assert (job.rank, job.world_size, job.address, job.port) == (1, 2, "10.0.0.7", 29501)


def test_several_processes_without_a_common_port_are_refused(bench: ModuleType) -> None:
    with pytest.raises(
        SystemExit, match="WORLD_SIZE = 2 without MASTER_PORT: start the processes with torchrun"
    ):
        bench.this_job({"WORLD_SIZE": "2"})


def ended(stall: str) -> subprocess.CompletedProcess[str]:
    """A process that marks a phase with a deadline of half a second and then does `stall`."""
    program = f"""
import ctypes, sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
from bench_train_watch import Phases
phases = Phases(0, 0.5)
phases.hint = "Not done: --variants 'plain'"
phases.mark("backward of layer 3")
{stall}
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_a_phase_past_its_deadline_ends_the_process_with_its_name_the_way_on_and_the_stacks() -> None:
    done = ended("time.sleep(600)")
    assert done.returncode == 1
    sentence = "rank 0] backward of layer 3: not done within --phase-s = 0.5. Not done: --variants 'plain'"
    assert sentence in done.stderr
    assert 'File "<string>", line 8' in done.stderr.split(sentence)[1]


def test_the_deadline_holds_also_where_a_compiler_keeps_pythons_lock() -> None:
    done = ended("ctypes.PyDLL(None).sleep(600)")
    assert done.returncode == 1
    assert "backward of layer 3\n" in done.stderr
    assert "Timeout" in done.stderr and 'File "<string>", line 8' in done.stderr


def test_phases_that_end_in_time_leave_the_process_alone() -> None:
    done = ended("phases.mark('next'); phases.close(); time.sleep(5)")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].endswith("] next")
