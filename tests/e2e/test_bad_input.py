"""What a person does wrong, or the machine lacks: a sentence that says what and what to do, exit code not 0, nothing left."""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_cluster.providers.local import LocalProvider
from slime_cua import train
from slime_cua.cli import guarded
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.types import EpisodeGroup
from tests.e2e.job import CONFIG, ROOT, Job, ended, write_model, write_tasks
from tests.e2e.local_rig import TEST_DISK

pytestmark = [pytest.mark.desktop, pytest.mark.timeout(600)]
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can set this up")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def refused(capsys, folder, *overrides):
    """The sentence with which the command refuses before it starts anything."""
    code = guarded(train.main, ["--config", str(CONFIG), f"run_dir={folder / 'run'}", *overrides])
    output = capsys.readouterr()
    assert code == 1 and output.out == "" and output.err.startswith("error: ")
    assert not (folder / "run").exists()
    return output.err


def test_an_unknown_key_is_answered_with_the_nearest(capsys, tmp_path):
    assert "unknown key rollout.max_turn; did you mean max_turns" in refused(
        capsys, tmp_path, "rollout.max_turn=3"
    )


def test_a_value_out_of_range_names_key_and_value(capsys, tmp_path):
    assert "save_every = 0: Input should be greater than or equal to 1" in refused(
        capsys, tmp_path, "save_every=0"
    )


def test_a_missing_config_file_is_named(capsys, tmp_path):
    assert guarded(train.main, ["--config", str(tmp_path / "no.yaml")]) == 1
    assert f"config file {tmp_path}/no.yaml does not exist" in capsys.readouterr().err


def test_a_missing_or_empty_model_folder_is_named(capsys, tmp_path):
    assert f"model = '{tmp_path}/no': there is no such folder" in refused(
        capsys, tmp_path, f"model={tmp_path}/no"
    )
    (tmp_path / "empty").mkdir()
    sentence = refused(capsys, tmp_path, f"model={tmp_path}/empty")
    assert (
        "config.json, tokenizer.json, preprocessor_config.json, *.safetensors (the weights) missing"
        in sentence
    )


def test_a_layout_that_the_model_does_not_allow_is_refused_before_anything_is_collected(
    capsys, tmp_path, model
):
    assert "trainer.parallel.tp = 3 does not divide" in refused(
        capsys, tmp_path, f"model={model}", "trainer.parallel.tp=3"
    )


def test_broken_task_files_are_named_with_line_and_field(capsys, tmp_path, model):
    path = write_tasks(tmp_path / "tasks.jsonl", "train")
    good = path.read_text().splitlines()
    path.write_text("\n".join([*good[:2], '{"id": "x", ']))
    assert f"{path}:3: not valid JSON" in refused(capsys, tmp_path, f"model={model}", f"tasks.train=[{path}]")
    broken = {**json.loads(good[1]), "evaluator": {}}
    path.write_text(good[0] + "\n" + json.dumps(broken))
    sentence = refused(capsys, tmp_path, f"model={model}", f"tasks.train=[{path}]")
    assert f"{path}:2: evaluator is missing or empty" in sentence


def test_a_task_that_is_trained_and_held_out_is_refused(capsys, tmp_path, model):
    path = write_tasks(tmp_path / "tasks.jsonl", "train")
    sentence = refused(capsys, tmp_path, f"model={model}", f"tasks.train=[{path}]", f"tasks.heldout=[{path}]")
    assert "in tasks.train and in tasks.heldout" in sentence


def test_a_port_in_use_is_named_with_the_way_out(tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "sandbox_cluster.gateway",
                "--port",
                str(port),
                "--state",
                str(tmp_path / "state"),
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "SLIME_CUA_CLIENT_TOKENS": "a:b",
                "SLIME_CUA_HOST_TOKENS": "c:d",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode != 0
    assert (
        f"port {port} on 127.0.0.1 is in use: stop the process that holds it, or choose another with --port"
        in done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.fixture
def displays():
    """Two X servers on displays of this machine."""
    command = ["Xvfb", "-displayfd", "1", "-screen", "0", "64x64x24", "-nolisten", "tcp"]
    servers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    yield [int(server.stdout.readline()) for server in servers]
    for server in servers:
        assert server.poll() is None
        server.terminate()
        server.wait()
        server.stdout.close()


async def test_displays_that_are_taken_do_not_matter_to_desktops(tmp_path, displays):
    assert len(set(displays)) == 2
    config = DesktopConfig(screen_wh_px=(320, 200), boot_timeout_s=120)
    provider = LocalProvider(config, tmp_path, "display-test")
    await provider.check()
    try:
        desktop = await provider.boot(0)
        assert desktop.screen_wh_px == (320, 200)
    finally:
        await provider.close()


def short_job(folder, model, *overrides, **options):
    """A run that only scores the model as it is."""
    tasks = write_tasks(folder / "heldout.jsonl", "heldout", **options.pop("tasks", {}))
    fixed = [
        f"model={model}",
        f"tasks.heldout=[{tasks}]",
        "tasks.train=[]",
        "sft.num_episodes=0",
        "num_steps=0",
    ]
    return Job(folder, [*fixed, "evaluation.arms=[base]", *overrides], **options)


def test_without_xvfb_the_package_to_install_is_named(tmp_path, model):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bwrap", "xkbcomp", "openbox", "sh", "prlimit", "uname"):
        (programs / name).symlink_to(shutil.which(name))
    with ended(short_job(tmp_path, model, environment={"PATH": str(programs)})) as job:
        assert job.start().wait() == 1
        assert "apt-get install -y --no-install-recommends xvfb" in job.sentence()
        job.assert_nothing_left()
        assert not list(job.run_dir.glob("episodes/*"))


@NEEDS_ROOT
def test_without_user_namespaces_the_line_to_run_is_named(tmp_path, model):
    command = [sys.executable, str(Path(__file__).resolve()), "--no-namespaces"]
    with ended(short_job(tmp_path, model, prefix=command)) as job:
        code = job.start().wait()
        if code == 77:
            pytest.skip("this machine lets nobody make a user namespace to forbid them in")
        assert code == 1
        assert "as root: sysctl -w user.max_user_namespaces=15000" in job.sentence()
        job.assert_nothing_left()


@pytest.mark.slow
def test_a_judge_that_raises_makes_episodes_invalid_never_zero(tmp_path, model):
    judge = {"judge": "def call_rule_judge_1(result, expected):\n    raise KeyError('no such answer')\n"}
    with ended(short_job(tmp_path, model, "sandbox.provider=fake", tasks=judge)) as job:
        assert job.start().wait() == 1
        sentence = job.sentence()
        assert "none of the 2 held-out episodes of base has a score" in sentence and "KeyError" in sentence
        stored = (job.run_dir / "episodes/eval_base.jsonl").read_text().splitlines()
        episodes = [episode for line in stored for episode in EpisodeGroup.model_validate_json(line).episodes]
        assert episodes and all(episode.reward is None and not episode.is_valid for episode in episodes)
        assert (job.run_dir / "metrics.jsonl").read_text() == ""
        job.assert_nothing_left()


@pytest.mark.slow
def test_a_worker_that_the_kernel_kills_once_too_often_ends_the_run_with_its_log_named(tmp_path, model):
    overrides = ("sandbox.provider=fake", "evaluation.num_attempts=500", "faults.max_failures=1")
    with ended(short_job(tmp_path, model, *overrides)) as job:
        job.start().wait_for("evaluating base: ")
        (worker,) = job.pids_of("ray::RolloutActor")
        os.kill(worker, signal.SIGKILL)
        assert job.wait() == 1
        assert "the rollout side" in job.sentence() and "logs/rollout.log" in job.sentence()
        assert "memory" in job.sentence()
        job.assert_nothing_left()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 640 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=640m", TEST_DISK, str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@NEEDS_ROOT
@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_what_could_not_be_written_and_what_was_there_stays_whole(
    tmp_path, model, small_disk
):
    tasks = write_tasks(tmp_path / "train.jsonl", "train")
    quick = [
        "sandbox.provider=fake",
        "sft.num_episodes=0",
        "evaluation.arms=[]",
        "trainer.parallel.tp=1",
        "num_steps=99",
    ]
    overrides = [f"model={model}", f"tasks.train=[{tasks}]", "tasks.heldout=[]", *quick]
    (tmp_path / "job").mkdir()
    with ended(Job(tmp_path / "job", overrides, run_path=small_disk / "run")) as job:
        job.start().wait_for("step 2: reward")
        with pytest.raises(OSError, match="No space left"), (small_disk / "filler").open("wb") as filler:
            while True:
                filler.write(bytes(1 << 20))
        assert job.wait() == 1
        assert "space" in job.sentence() and "left" in job.sentence()
        assert "Logging error" not in job.output
        state = json.loads((small_disk / "run/state.json").read_text())
        assert len(state["batches"]) == state["version"] >= 2
        for step in state["checkpoints"]:
            assert (small_disk / f"run/checkpoints/step_{step:08d}/manifest.json").is_file()
        job.assert_nothing_left()


@NEEDS_ROOT
def test_too_little_space_is_said_before_anything_starts(tmp_path, model, small_disk):
    with (small_disk / "filler").open("wb") as filler:
        filler.write(bytes(300 << 20))
    with ended(short_job(tmp_path, model)) as job:
        job.run_path = small_disk / "run"
        assert job.start().wait() == 1
        assert "MiB free, this run needs about" in job.sentence()
        assert "starting" not in job.output


def without_namespaces(command):
    """Run `command` where user namespaces are limited to none: in a user namespace of its own with all users mapped."""
    CLONE_NEWUSER = 0x10000000
    ready_read, ready_write = os.pipe()
    mapped_read, mapped_write = os.pipe()
    child = os.fork()
    if child == 0:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER) != 0:
            os._exit(77)
        os.write(ready_write, b"x")
        os.read(mapped_read, 1)
        try:
            Path("/proc/sys/user/max_user_namespaces").write_text("0")
        except OSError:
            os._exit(77)
        os.execv(command[0], command)
    os.close(ready_write)
    if os.read(ready_read, 1):
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text("0 0 100000\n")
        os.write(mapped_write, b"x")
    signal.signal(signal.SIGINT, lambda *_: os.kill(child, signal.SIGINT))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__" and sys.argv[1:2] == ["--no-namespaces"]:
    sys.exit(without_namespaces(sys.argv[2:]))
