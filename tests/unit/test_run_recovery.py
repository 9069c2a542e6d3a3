"""How runs end and go on: sentences for failures, nothing left of what was started, sweeps that go on."""

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout.sweep import MAX_INVALID_IN_A_ROW, Item, sweep
from slime_cua.core.errors import ConfigError, InfrastructureError, PreflightError
from slime_cua.core.types import Episode, Task, Turn
from slime_cua.data.episodes import EpisodeStore
from slime_cua.launch import preflight
from slime_cua.launch.children import descendants, no_child_left
from slime_cua.launch.failures import FAILURE_LOG, explained
from slime_cua.launch.ray_runtime import remove_abandoned, temporary_folder
from slime_cua.launch.signals import interrupt_on_signals, kept_handlers

ROOT = Path(__file__).resolve().parents[2]


class FromElsewhere(Exception):
    """As Ray's errors: a text with a whole traceback, and what was raised as `cause`."""

    def __init__(self, cause):
        super().__init__("Traceback (most recent call last):\n  File ...\nValueError: inner")
        self.cause = cause


@pytest.mark.parametrize(
    ("raised", "sentence"),
    [
        (ConfigError("seed = 'x': write a number"), "seed = 'x': write a number"),
        (ZeroDivisionError("by zero"), "unexpected ZeroDivisionError: by zero; the traceback is in "),
        (FromElsewhere(KeyError("id")), "unexpected KeyError: 'id'; the traceback is in "),
        (OSError(errno.ENOSPC, "No space left on device", "/runs/x"), "no space is left to write /runs/x "),
        (FromElsewhere(OSError(errno.ENOSPC, "No space left on device")), "no space is left to write "),
    ],
)
def test_a_failure_leaves_as_a_sentence_and_its_traceback_is_in_a_file(tmp_path, raised, sentence):
    with pytest.raises((InfrastructureError, ConfigError)) as caught, explained(tmp_path):
        raise raised
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)
    assert "Traceback (most recent call last)" in (tmp_path / FAILURE_LOG).read_text()


def test_ctrl_c_passes_as_it_is(tmp_path):
    with pytest.raises(KeyboardInterrupt), explained(tmp_path):
        raise KeyboardInterrupt
    assert not (tmp_path / FAILURE_LOG).exists()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_gone(pid, timeout_s):
    end = time.monotonic() + timeout_s
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_running(pid)


def test_orphans_of_the_block_are_ended_and_older_children_stay():
    program = (
        "import sys; from slime_cua.launch.children import no_child_left; import subprocess\n"
        "older = subprocess.Popen(['sleep', '60'])\n"
        "with no_child_left(grace_s=1.0):\n"
        "    out = subprocess.run(['sh', '-c', 'setsid sleep 60 >/dev/null 2>&1 & echo $!'], capture_output=True, text=True)\n"
        "print(out.stdout.strip(), older.pid, older.poll()); older.kill()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True, timeout=60
    )
    orphan, older, status = done.stdout.split()
    assert wait_gone(int(orphan), 5.0)
    assert status == "None" and wait_gone(int(older), 5.0)


def test_descendants_are_found_below_a_process():
    with no_child_left(grace_s=1.0):
        child = subprocess.Popen(["sh", "-c", "sleep 30 & wait"])
        end = time.monotonic() + 10
        while len(descendants(child.pid)) < 1 and time.monotonic() < end:
            time.sleep(0.02)
        (below,) = descendants(child.pid)
        assert {child.pid, below} <= set(descendants())
    assert child.wait(5) is not None
    assert wait_gone(below, 5.0)


def test_the_guardian_of_a_killed_driver_ends_its_processes_and_removes_its_folders(tmp_path):
    folder = tmp_path / "sockets"
    folder.mkdir()
    program = (
        "import subprocess, sys, time; from pathlib import Path; from slime_cua.launch.guardian import guarded\n"
        "with guarded() as guardian:\n"
        f"    guardian.remove_later(Path({str(folder)!r}))\n"
        "    child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "    print(child.pid, flush=True); time.sleep(60)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = int(driver.stdout.readline())
    driver.stdout.close()
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert wait_gone(child, 20.0)
    end = time.monotonic() + 10
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not folder.exists()


def test_folders_of_killed_runs_go_and_those_of_living_ones_stay(tmp_path):
    abandoned = tmp_path / "slime_cua_ray_old"
    (abandoned / "session").mkdir(parents=True)
    with temporary_folder(tmp_path) as mine:
        assert not abandoned.exists()
        assert remove_abandoned(tmp_path) == 0 and mine.is_dir()
    assert not mine.exists()


def episode(key, version=0, error=None):
    turn = Turn(
        index=0,
        starts_segment=True,
        context_ids=(1,),
        response_ids=(2,),
        response_logp=(0.0,),
        response_versions=(version,),
    )
    reward, reason = (None, "invalid") if error else (1.0, "terminated")
    return Episode(
        episode_id=f"{key}-e0",
        group_id=key,
        task_id="t",
        turns=(turn,),
        reward=reward,
        stop_reason=reason,
        error=error,
    )


async def test_items_without_a_score_are_played_again_after_a_resume(tmp_path):
    store = EpisodeStore(tmp_path / "eval.jsonl")
    played = []

    async def play(task, group_id, episode_id):
        played.append(group_id)
        return episode(group_id, error="SandboxError: gone" if len(played) == 1 else None)

    items = [Item(f"i-{n}", Task(id="t", instruction="x")) for n in range(2)]
    first = await sweep(items, play, store, max_retries=0, num_workers=1)
    assert [one.is_valid for one in first] == [False, True]
    second = await sweep(items, play, store, max_retries=0, num_workers=1)
    assert played == ["i-0", "i-1", "i-0"] and all(one.is_valid for one in second)


async def test_a_sweep_in_which_nothing_is_scored_ends_with_the_reasons(tmp_path):
    async def play(task, group_id, episode_id):
        return episode(group_id, error="SandboxError: no desktop boots")

    items = [Item(f"i-{n}", Task(id="t", instruction="x")) for n in range(100)]
    with pytest.raises(InfrastructureError, match=r"12 episodes in a row .* no desktop boots"):
        await sweep(items, play, EpisodeStore(tmp_path / "x.jsonl"), max_retries=0, num_workers=2)
    assert MAX_INVALID_IN_A_ROW == 12


def test_a_models_parameters_are_counted_by_the_headers_of_its_files(tmp_path):
    header = (
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[3,5]},"b":{"dtype":"F32","shape":[7]}}'
    )
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert preflight.num_parameters(tmp_path) == 22
    preflight.check_disk(tmp_path, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ConfigError, match="is no whole safetensors file"):
        preflight.num_parameters(tmp_path)


def test_a_run_that_will_not_fit_on_its_disk_is_refused(tmp_path):
    header = b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,0]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(
        PreflightError, match=r"MiB free, this run needs about \d+: free some, or set run_dir"
    ):
        preflight.check_disk(tmp_path, tmp_path)


def test_a_second_signal_does_not_cut_the_clean_up_short():
    cleaned = []
    with pytest.raises(KeyboardInterrupt), interrupt_on_signals():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGHUP)
            cleaned.append("all")
    assert cleaned == ["all"]


def test_a_signal_while_foreign_code_exits_on_it_ends_as_an_interrupt_and_the_handler_comes_back():
    with pytest.raises(KeyboardInterrupt), interrupt_on_signals():
        ours = signal.getsignal(signal.SIGTERM)
        try:
            with kept_handlers():
                signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
                signal.raise_signal(signal.SIGTERM)
        finally:
            assert signal.getsignal(signal.SIGTERM) is ours


def test_foreign_code_that_gives_up_by_itself_is_no_interrupt():
    with pytest.raises(SystemExit) as left, kept_handlers():
        sys.exit(1)
    assert left.value.code == 1
