"""Single failures are counted and mended, many in a short time end the run with a report; a rank that hangs is named."""

import json
import os
import time

import pytest

from rollout.engines.fleet import EngineFleet, HealthRule
from slime_cua.config.rollout import PublishConfig
from slime_cua.config.run import FaultConfig
from slime_cua.core.errors import CheckpointError, EngineError, InfrastructureError
from slime_cua.launch.faults import FaultLog
from slime_cua.launch.steady_trainer import SteadyTrainer
from slime_cua.launch.trainer_group import TrainerLost, Watch
from slime_cua.trainer import progress
from slime_cua.trainer.publish_ways import PublishPlan


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def test_failures_far_apart_do_not_stop_a_run_and_many_together_do_with_a_report(tmp_path):
    clock = Clock()
    faults = FaultLog(FaultConfig(max_failures=3, window_minutes=10), tmp_path, clock)
    for number in range(6):
        clock.now_s += 301
        faults.record("engine", f"engine {number} died", tmp_path / "engine_*.log")
    (tmp_path / "engine_0.log").write_text("".join(f"line {n}\n" for n in range(100)) + "Killed")
    (tmp_path / "trainer_1.log").write_text("CUDA error: device-side assert")
    clock.now_s += 1
    with pytest.raises(InfrastructureError) as caught:
        faults.record("trainer", "train_step: rank 1 died", tmp_path / "trainer_*.log")
    sentence = str(caught.value)
    assert sentence.startswith("3 failures within 10 minutes (faults.max_failures = 3), of engine, trainer; ")
    assert "the last: train_step: rank 1 died" in sentence and str(tmp_path / "fault_report.txt") in sentence
    report = (tmp_path / "fault_report.txt").read_text()
    assert "engine: engine 4 died" in report and "engine 3 died" not in report
    assert "line 99\nKilled" in report and "line 70\n" not in report and "CUDA error" in report
    rows = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert [row["part"] for row in rows] == ["engine"] * 6 + ["trainer"]


class FakeGroup:
    """Ranks that count; `script` says what each call does: an error, or nothing."""

    def __init__(self, script):
        self.script, self.calls, self.is_closed = script, [], False

    def call(self, method, *arguments):
        self.calls.append((method, *arguments))
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error
        return len(self.calls)

    def publish(self, version, urls, plan):
        return self.call("publish", version)

    def close(self):
        self.is_closed = True


def make_steady(tmp_path, scripts, max_failures=10):
    groups = []

    def start():
        script = scripts.pop(0)
        if isinstance(script, Exception):
            raise script
        groups.append(FakeGroup(script))
        return groups[-1]

    said = []
    faults = FaultLog(FaultConfig(max_failures=max_failures), tmp_path)
    trainer = SteadyTrainer(start, faults, said.append, tmp_path)
    trainer.rebuild = lambda call: call("restore", 7)
    return trainer, groups, said


def test_a_lost_rank_means_a_new_group_brought_back_and_the_same_call_again(tmp_path):
    lost = TrainerLost("rank 1 died")
    trainer, groups, said = make_steady(tmp_path, [[None, lost], [lost], TrainerLost("no GPU yet"), []])
    trainer.call("train_step", 1)
    trainer.call("train_step", 2)
    assert [group.is_closed for group in groups] == [True, True, False]
    assert groups[2].calls == [("restore", 7), ("train_step", 2)]
    assert trainer.num_restarts == 3 and "the trainer was lost in train_step: rank 1 died" in said
    plan = PublishPlan(PublishConfig(), use_gpu=False, engine_tp=1, folder=tmp_path)
    assert trainer.publish(3, (), plan) == 3


def test_a_rank_lost_while_steps_are_trained_again_means_all_of_them_again_and_none_twice(tmp_path):
    trainer, groups, _ = make_steady(
        tmp_path, [[None, None, TrainerLost("rank 0 died")], [TrainerLost("again")], []]
    )

    def rebuild(call):
        for step in range(4):
            call("train_step", step)

    trainer.rebuild = rebuild
    trainer.come_back()
    trainer.call("train_step", 4)
    assert [len(group.calls) for group in groups] == [3, 1, 5]
    assert groups[2].calls == [("train_step", step) for step in range(5)]


def test_a_rank_lost_in_the_second_of_two_calls_that_belong_together_means_both_again(tmp_path):
    trainer, groups, _ = make_steady(tmp_path, [[None, TrainerLost("rank 0 died")], []])
    trainer.together("train_step", lambda call: [call("train_step", share) for share in ("a", "b")])
    assert groups[1].calls == [("restore", 7), ("train_step", "a"), ("train_step", "b")]


def test_what_is_no_loss_is_raised_and_a_group_that_always_dies_ends_the_run(tmp_path):
    trainer, groups, _ = make_steady(tmp_path, [[CheckpointError("another model")]])
    with pytest.raises(CheckpointError, match="another model"):
        trainer.call("load")
    assert not groups[0].is_closed
    dying = [[TrainerLost("out of memory")] for _ in range(9)]
    trainer, groups, _ = make_steady(tmp_path, dying, max_failures=4)
    with pytest.raises(
        InfrastructureError, match=r"4 failures within 60 minutes .* the last: train_step: out of memory"
    ):
        trainer.call("train_step")
    assert len(groups) == 4 and all(group.is_closed for group in groups)


def test_progress_marks_are_read_as_written_and_a_long_one_is_cut(tmp_path):
    path = tmp_path / "rank"
    assert progress.read(path) == (0, "")
    progress.mark("nowhere to write")
    progress.open_file(path)
    try:
        progress.mark("micro-batch 3 of 8")
        first = progress.read(path)
        progress.mark("x" * 500)
        second = progress.read(path)
    finally:
        os.close(progress._file)
        progress._file = -1
    assert first[1] == "micro-batch 3 of 8" and second[0] == first[0] + 1
    assert set(second[1]) == {"x"} and path.stat().st_size == progress.WIDTH_BYTES


def marks(path, number, text):
    path.write_text(f"{number} 1.0 {text}\n")


def test_a_call_is_over_when_no_rank_moves_for_so_long_and_the_one_behind_is_named(tmp_path):
    clock, files = Clock(), [tmp_path / "0", tmp_path / "1"]
    watch = Watch(files, 60.0, clock=clock)
    for number in range(1, 5):
        clock.now_s += 50
        marks(files[0], number, f"micro-batch {number}")
        assert not watch.is_over(), "one rank moves: the call is slow, not stuck"
    marks(files[1], 2, "micro-batch 2")
    assert not watch.is_over()
    clock.now_s += 59
    assert not watch.is_over()
    clock.now_s += 1
    assert watch.is_over()
    assert watch.report() == "rank 0 at 'micro-batch 4', rank 1 at 'micro-batch 2' (behind)"


def test_a_start_has_a_deadline_whatever_moves(tmp_path):
    clock, file = Clock(), tmp_path / "0"
    watch = Watch([file], 60.0, is_total=True, clock=clock)
    for number in range(1, 4):
        clock.now_s += 19
        marks(file, number, "joining")
        assert not watch.is_over()
    clock.now_s += 3
    marks(file, 9, "joining")
    assert watch.is_over() and watch.report() == "rank 0 at 'joining'"


class DeadEngine:
    """A server that came up once and never again."""

    url, pid, is_running = "http://127.0.0.1:9", 0, False

    def start(self):
        return self.url

    def restart(self):
        raise EngineError("no GPU")

    def stop(self):
        return


class GoodEngine(DeadEngine):
    url, is_running = "http://127.0.0.1:1", True


def test_an_engine_that_does_not_come_back_is_one_loss_and_the_others_go_on():
    fleet = EngineFleet(
        [DeadEngine(), GoodEngine()], rule=HealthRule(interval_s=0.01, window=1000, max_misses=1000)
    )
    with fleet:
        end = time.monotonic() + 60
        while fleet.restarts() < 3 and time.monotonic() < end:
            time.sleep(0.02)
        assert fleet.restarts() >= 3 and fleet.losses() == 1
        assert fleet.serving() == (GoodEngine.url,)
