"""The scripted teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_cua.config.run import TeacherConfig
from slime_cua.core.actions import TerminateAction
from slime_cua.core.errors import TaskError
from slime_cua.core.types import Task
from slime_cua.sft.teacher import ScriptedTeacher
from tests.unit.starter_desk import Desk, shipped


def play(task: Task, teacher: ScriptedTeacher, home: Path) -> float:
    desk = Desk(task, home)
    for index in range(teacher.num_turns):
        desk.act(teacher.next(None, index))
    return desk.score()


def test_it_ends_with_terminate_and_stays_there():
    teacher = ScriptedTeacher(shipped("train", "boxes")[0])
    assert isinstance(teacher.next(None, teacher.num_turns - 1), TerminateAction)
    assert teacher.next(None, teacher.num_turns + 5) == teacher.next(None, teacher.num_turns - 1)


def test_the_same_seed_shows_the_same_demonstration():
    config = TeacherConfig(error_rate=0.5, detour_rate=0.5)
    for task in shipped("train", "theme")[:10]:
        assert ScriptedTeacher(task, 3, config).actions == ScriptedTeacher(task, 3, config).actions


def test_ways_are_drawn_with_their_weights():
    task = shipped("train", "theme")[0]
    config = TeacherConfig(route_weights={"gui": 3.0, "bash": 1.0})
    routes = [ScriptedTeacher(task, seed, config).route for seed in range(400)]
    assert 0.68 < routes.count("gui") / 400 < 0.82
    assert set(routes) == {"gui", "bash"}


def test_a_task_without_a_weighted_way_shows_its_first_one():
    config = TeacherConfig(route_weights={"gui": 1.0})
    assert ScriptedTeacher(shipped("train", "files")[0], 0, config).route == "bash"


def test_the_error_rate_is_the_share_of_episodes_that_score_0(tmp_path: Path):
    config = TeacherConfig(error_rate=0.3)
    tasks = shipped("train")[::5]
    teachers = [ScriptedTeacher(task, 1, config) for task in tasks]
    scores = [
        play(task, teacher, tmp_path / str(i))
        for i, (task, teacher) in enumerate(zip(tasks, teachers, strict=True))
    ]
    assert scores == [0.0 if teacher.is_spoiled else 1.0 for teacher in teachers]
    assert 0.2 < scores.count(0.0) / len(scores) < 0.4


def test_detours_lengthen_a_demonstration_and_do_not_spoil_it(tmp_path: Path):
    task = shipped("train", "boxes")[0]
    plain = ScriptedTeacher(task)
    detoured = ScriptedTeacher(task, 0, TeacherConfig(detour_rate=1.0))
    assert detoured.num_turns == 2 * plain.num_turns - 1
    assert play(task, detoured, tmp_path / "desk") == 1.0


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "no `routes`"),
        ({"routes": {"gui": [{"type": "gui", "kind": "jump"}]}}, "routes.gui is not a list of actions"),
        ({"routes": {"gui": [{"type": "gui", "kind": "wait"}]}}, "does not end with a terminate"),
    ],
)
def test_a_task_without_a_playable_script_is_named(metadata: dict, said: str):
    with pytest.raises(TaskError, match=said) as caught:
        ScriptedTeacher(Task(id="t-1", instruction="do it", metadata=metadata))
    assert "t-1" in str(caught.value)
