"""The first command on somebody's machine: what it installs and says, and arguments it refuses. Python, pip and apt are doubles."""

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "python3": """
echo "$*" >> "$ROOM/calls"
case "$*" in
  "-c import ensurepip") exit "${NO_VENV:-0}" ;;
  "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/pip ;;
  "-c import torch") exit 1 ;;
  *--dry-run*) cat "$ROOM/report" ;;
esac""",
    "dpkg-query": 'grep -qx "$3" "$ROOM/installed" && echo "install ok installed"',
    "apt-get": 'echo "apt-get $*" >> "$ROOM/calls"',
    "id": 'echo "${USER_ID:-0}"',
    "nvidia-smi": "exit 1",
}
"""Doubles of a machine's programs; python3 is pip, too."""
TORCH = "torch==2.13.0"


@pytest.fixture
def room(tmp_path):
    """A machine with its copy of the scripts; nothing is installed on it but what apt.txt names."""
    for name in (
        "scripts/env.sh",
        "scripts/apt.txt",
        "recipes/quickstart.sh",
        "setup.py",
        "requirements/cpu.lock",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name, body in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    shutil.copy(tmp_path / "scripts/apt.txt", tmp_path / "installed")
    (tmp_path / "report").write_text("")
    (tmp_path / "calls").write_text("")
    return tmp_path


def call(room, script, *arguments, **environment):
    """The finished script, and the programs that it called meanwhile."""
    path = f"{room}/bin:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", str(room / script), *arguments],
        env={"PATH": path, "ROOM": str(room), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    calls = (room / "calls").read_text().splitlines()
    (room / "calls").write_text("")
    return done, calls


def report(*names):
    """What pip says it would install: over many lines, and as long as the real one, some hundred kilobytes."""
    packages = [{"metadata": {"name": name, "description": "x" * 200_000}} for name in names]
    return json.dumps({"install": packages}, indent=2)


def torch_installs(calls):
    return [
        line.split("install ", 1)[1] for line in calls if line.endswith(TORCH) and "--dry-run" not in line
    ]


@pytest.mark.parametrize(
    ("resolved", "environment", "expected"),
    [
        (
            report("torch", "nvidia-cublas", "triton"),
            {},
            f"-q --index-url https://download.pytorch.org/whl/cpu {TORCH}",
        ),
        (
            report("torch", "cuda-bindings"),
            {"SLIME_CUA_TORCH_INDEX": "http://i/cpu"},
            f"-q --index-url http://i/cpu {TORCH}",
        ),
        ("", {}, f"-q --index-url https://download.pytorch.org/whl/cpu {TORCH}"),
        (report("torch", "sympy"), {}, f"-q {TORCH}"),
    ],
    ids=["pip would take CUDA", "another index", "pip cannot say", "pip takes the CPU build"],
)
def test_without_a_gpu_no_cuda_build_is_installed_and_the_size_is_said_first(
    room, resolved, environment, expected
):
    (room / "report").write_text(resolved)
    done, calls = call(room, "scripts/env.sh", **environment)
    assert done.returncode == 0, done.stderr
    assert torch_installs(calls) == [expected]
    assert f"installing the CPU build of {TORCH}" in done.stdout and "about 200 MB to download" in done.stdout


def test_with_a_gpu_the_size_of_the_cuda_build_is_said(room):
    (room / "bin/nvidia-smi").write_text("#!/bin/bash\n")
    done, calls = call(room, "scripts/env.sh")
    assert done.returncode == 0 and f"-m pip --disable-pip-version-check install -q {TORCH} numpy" in calls
    assert "a CUDA build, about 3 GB to download" in done.stdout


def test_when_nothing_changed_nothing_is_installed_again(room):
    assert call(room, "scripts/env.sh")[0].returncode == 0
    done, calls = call(room, "scripts/env.sh")
    assert done.returncode == 0 and not [line for line in calls if "install" in line]


def test_without_root_the_one_line_to_run_is_said_and_nothing_is_done(room):
    (room / "installed").write_text("xvfb\n")
    done, calls = call(room, "scripts/env.sh", USER_ID="1000")
    missing = " ".join(name for name in (ROOT / "scripts/apt.txt").read_text().split() if name != "xvfb")
    line = f"run: sudo apt-get install -y --no-install-recommends {missing}"
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.strip().endswith(line)
    assert not (room / ".venv").exists() and not [name for name in calls if name.startswith("apt-get")]


def test_as_root_missing_packages_are_named_and_installed_with_what_makes_environments(room):
    (room / "installed").write_text((ROOT / "scripts/apt.txt").read_text().replace("openbox\n", ""))
    done, calls = call(room, "scripts/env.sh", NO_VENV="1")
    assert done.returncode == 0, done.stderr
    assert "installing 2 system packages (about 120 MB on disk): openbox python3-venv" in done.stdout
    assert "apt-get install -y -qq --no-install-recommends openbox python3-venv" in calls


def quickstart(room, *arguments):
    """The quickstart's answer and the command of the run that it started, if any."""
    (room / "scripts/env.sh").write_text("")
    (room / ".venv/bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(room / "bin/python3", room / ".venv/bin/python")
    done, calls = call(room, "recipes/quickstart.sh", *arguments)
    return done, [line.removeprefix("-m slime_cua.train --config ") for line in calls]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--minutes"],
        *(["--minutes", value] for value in ("", "0", "00", "-3", "1.5", "3m", "9999999")),
        ["--frehs"],
        ["x"],
    ],
)
def test_bad_arguments_are_a_sentence_and_nothing_starts(room, arguments):
    done, runs = quickstart(room, *arguments)
    assert done.returncode == 2 and runs == []
    assert done.stderr.startswith("quickstart: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        ([], "recipes/quickstart.yaml run_dir=runs/quickstart"),
        (["--minutes", "3"], "recipes/quickstart_tour.yaml run_dir=runs/quickstart_tour"),
        (["--minutes", "018"], "recipes/quickstart.yaml run_dir=runs/quickstart minutes=8"),
        (["run_dir=x", "--minutes", "3"], "recipes/quickstart_tour.yaml run_dir=x"),
        (["seed=1", "run_dir=a b", "num_steps=2"], "recipes/quickstart.yaml run_dir=a b seed=1 num_steps=2"),
    ],
)
def test_arguments_choose_config_run_directory_and_keys_in_any_order(room, arguments, run):
    assert quickstart(room, *arguments)[1] == [run]


def test_fresh_removes_an_earlier_run_and_nothing_else(room):
    old = room / "runs/quickstart"
    (old / "logs").mkdir(parents=True)
    (old / "lock").touch()
    (old / "state.json").touch()
    assert quickstart(room, "--fresh")[0].returncode == 0 and not old.exists()
    assert quickstart(room, "--fresh")[0].returncode == 0
    (room / "home/logs").mkdir(parents=True)
    done, runs = quickstart(room, "--fresh", "run_dir=home")
    assert done.returncode == 2 and "home is no run directory" in done.stderr
    assert runs == [] and (room / "home/logs").exists()


def test_fresh_leaves_a_run_that_is_at_work(room):
    run = room / "runs/quickstart"
    (run / "logs").mkdir(parents=True)
    lock = os.open(run / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    done, runs = quickstart(room, "--fresh")
    os.close(lock)
    assert done.returncode == 2 and "a run is at work in it" in done.stderr
    assert runs == [] and run.exists()
