"""Parts of a run are killed one by one while it trains: each comes back, nothing hangs, too many of them end the run."""

import json
import os
import signal

import pytest

from tests.e2e.job import Job, ended, make_job, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.desktop
def test_parts_that_are_killed_or_hang_come_back_and_too_many_of_them_end_the_run_with_a_report(
    tmp_path, model
):
    job = make_job(
        tmp_path,
        model,
        "sft.num_episodes=0",
        "evaluation.arms=[]",
        "num_steps=500",
        "save_every=4",
        "trainer.timeout_s=90",
        f"faults.max_failures={len(PARTS) + 2}",
    )
    with ended(job):
        job.start().wait_for("step 1: reward")
        second = Job(tmp_path / "second", job.overrides, run_path=job.run_dir)
        (tmp_path / "second").mkdir()
        assert second.start().wait(60.0) == 1
        assert f"another run is at work in {job.run_dir}: wait, end it, or set run_dir" in second.sentence()
        for part in PARTS:
            pid = job.pids_of(part)[0]
            os.kill(pid, signal.SIGKILL)
            wait_for_more_steps(job, part, pid)
        pid = job.pids_of("ray::TrainerActor")[0]
        os.kill(pid, signal.SIGSTOP)
        wait_for_more_steps(job, "ray::TrainerActor", pid)
        assert "the trainer was lost in" in job.log()
        os.kill(job.pids_of("ray::TrainerActor")[0], signal.SIGKILL)
        assert job.wait(300.0) == 1
        assert f"{len(PARTS) + 2} failures within 60 minutes" in job.sentence()
        report = (job.run_dir / "logs/fault_report.txt").read_text()
        for name in ("gateway:", "host:", "engine:", "rollout:", "trainer:", "Last lines of"):
            assert name in report, report
        job.assert_nothing_left()
        state = json.loads((job.run_dir / "state.json").read_text())
        names = [name for batch in state["batches"] for name in batch["groups"]]
        assert len(set(names)) == len(names) == 2 * state["version"]


PARTS = (
    "-m sandbox_cluster.gateway",
    "-m sandbox_cluster.host",
    "-m rollout.embedded",
    "ray::RolloutActor",
    "ray::TrainerActor",
)


def wait_for_more_steps(job, part, pid):
    """Three steps after `pid` was lost, and another in its place."""
    done = last_step(job)
    job.wait_until(lambda: set(job.pids_of(part)) - {pid} and pid not in job.pids_of(part), f"new {part}")
    job.wait_until(lambda: last_step(job) >= done + 3, f"three more steps after the end of {part}")


def last_step(job):
    """The last step that the driver told of."""
    lines = [line for line in job.log().splitlines() if ": reward " in line]
    return int(lines[-1].split("step ")[1].split(":")[0])
