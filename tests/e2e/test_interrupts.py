"""The driver is ended in each phase by each signal: nothing is left, nothing hangs, the same command goes on.

SLIME_CUA_ALL_SIGNALS=1 tries all three signals in every phase (about 8 minutes); without it each phase gets one of them.
"""

import json
import os
import re
import signal

import pytest

from slime_cua.core.types import EpisodeGroup
from tests.e2e.job import ended, make_job, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PHASES = {
    "start": "starting Ray",
    "demonstrations": "collecting 4 demonstrations",
    "SFT": "cold start: step 3 of",
    "RL, waiting": "step 1: waiting for episodes",
    "RL, training": "step 2: training",
    "evaluation": "evaluating rl on",
}
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
ALL = pytest.mark.skipif(
    not os.environ.get("SLIME_CUA_ALL_SIGNALS"), reason="SLIME_CUA_ALL_SIGNALS is not set"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=ALL), pytest.param(2, marks=ALL)])
def test_ended_in_any_phase_by_any_signal_it_leaves_nothing_and_the_same_command_finishes(
    tmp_path, model, turn
):
    job = make_job(
        tmp_path,
        model,
        "sandbox.provider=fake",
        "trainer.parallel.tp=1",
        "sft.num_epochs=8",
        "sft.save_every=2",
        "evaluation.arms=[rl]",
    )
    with ended(job):
        for number, line in enumerate(PHASES.values()):
            sent = SIGNALS[(number + turn) % len(SIGNALS)]
            job.start().wait_for(line)
            job.kill(
                sent, is_group=sent == signal.SIGINT
            )  # a terminal's Ctrl-C goes to all processes of the job
            code = job.wait(60.0)
            job.assert_nothing_left()
            assert "Traceback" not in job.output, job.output
            if sent == signal.SIGKILL:
                assert code == -signal.SIGKILL
            else:
                assert code == 130, job.output
                assert "interrupted; the same command continues where it stopped" in job.output
        assert job.start().wait() == 0, job.output
        job.assert_nothing_left()
        check_finished(job)
        assert re.search(
            r"cold start: continuing at step [24]", (job.run_dir / "logs/driver.log").read_text()
        )
        check_that_a_finished_run_goes_on_when_more_steps_are_asked_for(job)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_rays_start_ends_the_run_as_any_other(tmp_path, model, sent):
    """Ray has put its own handler for SIGTERM by then, and not yet told anybody which processes it started."""
    with ended(make_job(tmp_path, model, "sandbox.provider=fake")) as job:
        job.start().wait_until(lambda: bool(job.pids_of("gcs_server")), "a part of Ray")
        job.kill(sent, is_group=sent == signal.SIGINT)
        assert job.wait(60.0) == 130, job.output
        assert "interrupted; the same command continues where it stopped" in job.output
        assert "Traceback" not in job.output, job.output
        job.assert_nothing_left()


def check_that_a_finished_run_goes_on_when_more_steps_are_asked_for(job):
    groups = set(job.run_dir.joinpath("episodes/rl.jsonl").read_text().splitlines())
    job.overrides.append("num_steps=3")
    assert job.start().wait() == 0, job.output
    assert "RL goes on from step 2 to 3" in job.output and "continuing at step 2" in job.output
    assert "cold start" not in job.output
    state = json.loads((job.run_dir / "state.json").read_text())
    names = [name for batch in state["batches"] for name in batch["groups"]]
    assert state["version"] == 3 and len(set(names)) == len(names) == 6
    assert groups < set(job.run_dir.joinpath("episodes/rl.jsonl").read_text().splitlines())
    assert (job.run_dir / "episodes/eval_rl_step_2.jsonl").is_file()
    rows = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["axis"] == "step"] == [1, 2, 3]
    assert [row["step"] for row in rows if row["axis"] == "eval"] == [2]
    assert job.start().wait() == 0 and "continuing at step" not in job.output, job.output
    assert "Held-out success" in job.output and "starting" not in job.output, job.output


def check_finished(job):
    """As if nothing had happened: each step once, each group once, every phase done."""
    assert set(json.loads((job.run_dir / "phases.json").read_text())) == {"sft", "rl", "eval_rl"}
    rows = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["axis"] == "step"] == [1, 2]
    assert [row["step"] for row in rows if row["axis"] == "sft_step"] == list(range(8))
    lines = (job.run_dir / "episodes/rl.jsonl").read_text().splitlines()
    groups = [EpisodeGroup.model_validate_json(line).group_id for line in lines]
    assert len(set(groups)) == len(groups) >= 4
    assert not list(job.run_dir.rglob("*unfinished*"))
