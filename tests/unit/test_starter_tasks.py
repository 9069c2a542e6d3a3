"""Claims about every shipped starter task, on a desk without a display."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from slime_cua.config.run import TeacherConfig
from slime_cua.core.actions import Action, CodeAction, GuiAction
from slime_cua.core.coordinates import to_pixels
from slime_cua.core.types import Task
from slime_cua.sft.teacher import ScriptedTeacher
from slime_cua.synthesis.starter.apps.board import Model, scaled
from slime_cua.synthesis.starter.generate import FAMILIES, SCREEN_FAMILIES, SPLITS, write_tasks
from slime_cua.synthesis.starter.vocabulary import (
    CODE_PIECES,
    GRID_STEP,
    HINTS,
    KEYS,
    MIN_SIDE_PX,
    SCREEN_WH_PX,
    TOP_PX,
    all_tokens,
    instruction_tokens,
)
from tests.unit.starter_desk import TASKS, Desk, shipped

FAMILY_NAMES = sorted(FAMILIES)


def both_splits(family: str) -> list[Task]:
    return [task for split in SPLITS for task in shipped(split, family)]


def spec_of(task: Task) -> dict | None:
    for step in task.config:
        for file in step["parameters"].get("files", []):
            if file["path"].endswith("/spec.json"):
                return json.loads(file["content"])
    return None


def things_of(task: Task) -> list[dict]:
    spec = spec_of(task) or {"things": []}
    return [thing for part in [spec, *spec.get("windows", [])] for thing in part["things"]]


def routes_of(task: Task) -> dict[str, tuple[Action, ...]]:
    return {
        way: ScriptedTeacher(task, config=TeacherConfig(route_weights={way: 1})).actions
        for way in task.metadata["routes"]
    }


def looks_like(task: Task) -> tuple:
    """What a policy would recognise again: words, coarse layout, files that it is shown."""
    layout = sorted(
        (thing["kind"], thing.get("shape", ""), thing["fill"], thing["box"][0] // 64, thing["box"][1] // 64)
        for thing in things_of(task)
    )
    words = re.sub(r" to the file \w+", "", task.instruction) if task.family == "hybrid" else task.instruction
    files = [
        (file["path"], file.get("content", ""))
        for step in task.config
        for file in step["parameters"].get("files", [])
        if "/.starter/" not in file["path"] and task.family != "files"  # no window shows those
    ]
    return (words, tuple(layout), tuple(sorted(files)))


def test_every_family_has_enough_instances_and_ids_are_unique():
    counts = {split: Counter(task.family for task in shipped(split)) for split in SPLITS}
    assert sorted(counts["train"]) == sorted(counts["heldout"]) == FAMILY_NAMES
    assert min(counts["train"].values()) >= 60 and min(counts["heldout"].values()) >= 20
    ids = [task.id for split in SPLITS for task in shipped(split)]
    assert len(set(ids)) == len(ids)


def test_shipped_files_are_what_the_generator_makes(tmp_path: Path):
    counts = {split: len(shipped(split, "press")) for split in SPLITS}
    write_tasks(tmp_path, counts)
    for made in tmp_path.rglob("*.jsonl"):
        there = (TASKS / made.relative_to(tmp_path)).read_text()
        assert re.sub(r'"local_path":"[^"]*/', '"local_path":"', made.read_text()) == re.sub(
            r'"local_path":"[^"]*/', '"local_path":"', there
        )


def test_programs_named_by_the_tasks_exist_beside_them():
    for split in SPLITS:
        for task in shipped(split):
            for step in task.config:
                for file in step["parameters"].get("files", []):
                    if "local_path" in file:
                        assert (TASKS / split / file["local_path"]).is_file()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_initial_state_scores_0_every_solution_1_and_the_wrong_attempt_0(family: str, tmp_path: Path):
    for number, task in enumerate(both_splits(family)):
        wrong = ScriptedTeacher(
            task.model_copy(update={"metadata": {"routes": {"w": task.metadata["wrong"]}}})
        )
        attempts = [(1.0, actions) for actions in routes_of(task).values()] + [(0.0, wrong.actions)]
        for index, (expected, actions) in enumerate(attempts):
            desk = Desk(task, tmp_path / f"{number}-{index}")
            if index == 0:
                assert desk.score() == 0.0, f"{task.id} scores before anything was done"
            for action in actions:
                desk.act(action)
            assert desk.score() == expected, f"{task.id}: {task.instruction} {actions}"


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_giving_up_at_once_scores_only_where_the_task_cannot_be_done(family: str, tmp_path: Path):
    for number, task in enumerate(shipped("heldout", family)):
        desk = Desk(task, tmp_path / str(number))
        desk.last_status = "failure"
        assert desk.score() == float(task.is_infeasible)


def test_infeasible_tasks_are_few_and_their_feasible_twins_as_many():
    for split in SPLITS:
        tasks = shipped(split)
        assert sum(task.is_infeasible for task in tasks) <= 0.1 * len(tasks)
        twins = [task for task in tasks if task.family == "missing"]
        assert 0.3 <= sum(task.is_infeasible for task in twins) / len(twins) <= 0.7


def test_no_held_out_instance_looks_like_one_for_training():
    train, shown = ({looks_like(task) for task in shipped(split)} for split in ("train", "demonstrations"))
    heldout = [looks_like(task) for task in shipped("heldout")]
    assert not train & set(heldout) and not shown & set(heldout)
    assert not train & shown, "RL would draw what the teacher has shown"
    assert len(set(heldout)) == len(heldout)


def test_instructions_and_actions_use_the_closed_vocabulary_only():
    words, tokens = set(instruction_tokens()), set(all_tokens())
    pieces = re.compile("|".join(sorted(map(re.escape, CODE_PIECES), key=len, reverse=True)))
    for split in SPLITS:
        for task in shipped(split):
            found = re.findall(r"\w+|[^\w\s]", task.instruction)
            assert set(found) <= words, task.instruction
            assert len(found) <= 17, task.instruction
            for actions in routes_of(task).values():
                assert 1 <= len(actions) <= 5
                for action in actions:
                    if isinstance(action, CodeAction):
                        assert set(pieces.sub(" ", action.code).split()) <= tokens, action.code
                    if isinstance(action, GuiAction) and action.point:
                        assert action.point.x % GRID_STEP == 0 and action.point.y % GRID_STEP == 0
                    if isinstance(action, GuiAction):
                        assert set(action.keys) <= {*KEYS, *HINTS}
                        assert action.text is None or action.text in tokens


def test_things_are_large_apart_and_below_the_title_bar():
    width, height = SCREEN_WH_PX
    for split in SPLITS:
        for task in shipped(split):
            spec = spec_of(task)
            for part in [spec, *spec.get("windows", [])] if spec else []:
                boxes = [thing["box"] for thing in part["things"]]
                for index, (x, y, w, h) in enumerate(boxes):
                    assert w >= MIN_SIDE_PX and h >= MIN_SIDE_PX
                    assert x >= 0 and y >= TOP_PX and x + w <= width and y + h <= height
                    for a, b, c, d in boxes[:index]:
                        assert x + w <= a or a + c <= x or y + h <= b or b + d <= y, task.id


def test_demonstrated_clicks_are_well_inside_what_they_hit():
    for split in SPLITS:
        for task in shipped(split):
            boxes = [thing["box"] for thing in things_of(task)]
            for action in routes_of(task).get("gui", ()):
                if isinstance(action, GuiAction) and action.point and task.family != "dialog":
                    px, py = to_pixels(action.point, SCREEN_WH_PX)
                    assert any(
                        x + 20 <= px < x + w - 20 and y + 20 <= py < y + h - 20 for x, y, w, h in boxes
                    )


@pytest.mark.parametrize("way", [0, "hints"])
@pytest.mark.parametrize("family", [name for name in SCREEN_FAMILIES if name != "missing"])
def test_a_policy_that_does_not_look_fails(family: str, way: int | str, tmp_path: Path):
    """The best first action by instruction over the training instances, then the true rest: few held-out ones fall."""

    def solution(task: Task) -> tuple[Action, ...]:
        routes = routes_of(task)
        return routes["hints"] if way in routes else next(iter(routes.values()))

    known: dict[str, Counter[Action]] = defaultdict(Counter)
    overall: Counter[Action] = Counter()
    shape = re.compile(r"file \w+")
    for task in shipped("train", family):
        first = solution(task)[0]
        known[shape.sub("file", task.instruction)][first] += 1
        overall[first] += 1
    hits = 0
    tasks = shipped("heldout", family)
    for number, task in enumerate(tasks):
        guess = (known[shape.sub("file", task.instruction)] or overall).most_common(1)[0][0]
        if isinstance(guess, CodeAction):
            name = task.instruction.removesuffix(".").split()[-1]
            guess = guess.model_copy(update={"code": re.sub(r"~/\w+", f"~/{name}", guess.code)})
        desk = Desk(task, tmp_path / str(number))
        for action in (guess, *solution(task)[1:]):
            desk.act(action)
        hits += desk.score() == 1.0
    assert hits <= 0.3 * len(tasks), f"{hits} of {len(tasks)} solved without looking"


def test_a_forged_or_broken_board_state_scores_0_and_raises_nothing(tmp_path: Path):
    task = shipped("train", "press")[0]
    desk = Desk(task, tmp_path / "desk")
    state = tmp_path / "desk" / ".starter" / "state.json"
    real = json.loads(state.read_text())
    for target in [thing["id"] for thing in things_of(task)]:
        state.write_text(json.dumps({**real, "events": [["press", target]]}))
        assert desk.score() == 0.0
    for junk in (b"", b"{", b"[]", b"\xff\xfe", b"{}", b"[" * 90_000, b'{"events": 1, "tag": 2}'):
        state.write_bytes(junk)
        assert desk.score() == 0.0
    state.unlink()
    assert desk.score() == 0.0


def test_pressing_everything_does_not_pass(tmp_path: Path):
    task = next(task for task in shipped("train", "press") if len(things_of(task)) > 1)
    desk = Desk(task, tmp_path / "desk")
    assert desk.board is not None
    for thing in things_of(task):
        desk.board.click(thing["box"][0] + 30, thing["box"][1] + 30)
    assert desk.score() == 0.0


def test_a_hint_reaches_only_what_is_on_top_and_types_in_a_chosen_field(tmp_path: Path):
    covered = next(t for t in shipped("train", "dialog") if t.instruction.startswith("close"))
    desk = Desk(covered, tmp_path / "covered")
    assert desk.board is not None
    for thing in (spec_of(covered) or {})["things"]:
        desk.board.key(thing["hint"], thing["hint"])
    assert desk.board.events == []
    form = shipped("train", "entry")[0]
    desk = Desk(form, tmp_path / "form")
    assert desk.board is not None
    field, *_, done = things_of(form)
    desk.board.key(field["hint"], field["hint"])
    desk.board.key(done["hint"], done["hint"])
    assert desk.board.texts[field["id"]] == done["hint"] and not desk.board.is_locked


def test_hints_differ_on_a_board_and_tell_nothing_about_the_answer():
    firsts = Counter[str]()
    for task in shipped("train"):
        hints = [thing["hint"] for thing in things_of(task) if "hint" in thing]
        assert len(set(hints)) == len(hints)
        if task.family in ("press", "place"):
            firsts[routes_of(task)["hints"][0].keys[0] if "hints" in task.metadata["routes"] else ""] += 1
    assert max(firsts.values()) <= 0.2 * firsts.total() and set(firsts) == set(HINTS)


def test_the_name_under_which_a_press_is_written_down_tells_its_place_and_no_answer():
    """A program of the policy can read what the board wrote: it must not learn from there whether it pressed the right one."""
    targets = Counter[str]()
    for split in SPLITS:
        for family in ("press", "place", "missing"):
            for task in shipped(split, family):
                things = things_of(task)
                assert {thing["id"] for thing in things} == {
                    "{}-{}".format(*thing["box"]) for thing in things
                }
                judge = json.dumps(task.evaluator)
                targets.update(thing["id"] for thing in things if repr(thing["id"]) in judge)
    assert max(targets.values()) <= 0.05 * targets.total()


def test_a_board_scales_to_the_screen_and_the_same_grid_position_hits(tmp_path: Path):
    width, height = 1504, 832
    for task in shipped("heldout", "press")[:5]:
        spec = spec_of(task)
        assert spec is not None
        spec["state"] = str(tmp_path / "state.json")
        board = Model(scaled(spec, width, height))
        click = routes_of(task)["gui"][0]
        assert isinstance(click, GuiAction) and click.point
        board.click(*to_pixels(click.point, (width, height)))
        assert [event[0] for event in board.events] == ["press"]
        x, y, w, h = next(thing["box"] for thing in board.spec["things"] if thing["id"] == board.events[0][1])
        assert 0 <= x < x + w <= width and 0 <= y < y + h <= height
