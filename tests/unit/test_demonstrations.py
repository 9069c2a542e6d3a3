"""What an episode records of a task: nothing that the policy cannot see. The teacher knows the solution; its prompts do not."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rollout.actions import ActionSpace, format_action
from rollout.context import context_policy
from rollout.episode import EpisodeRunner
from rollout.renderer import Renderer
from sandbox_cluster.api import EvaluateReply, ExecuteReply
from sandbox_cluster.client import Shot
from slime_cua.config.base import load
from slime_cua.config.run import RunConfig, TeacherConfig
from slime_cua.core.actions import Action, CodeAction, GuiAction
from slime_cua.core.types import Task
from slime_cua.data.images import ImageStore
from slime_cua.sft.demonstrations import TeacherPolicy
from slime_cua.sft.teacher import ScriptedTeacher
from slime_cua.synthesis.starter.generate import FAMILIES
from tests.unit.starter_desk import REPO, shipped

CONFIG = load(RunConfig, REPO / "recipes/quickstart.yaml").rollout


class GreyDesktop:
    """A desktop on which nothing is seen and nothing happens."""

    def __init__(self) -> None:
        buffer = io.BytesIO()
        Image.new("RGB", (640, 384), "grey").save(buffer, "PNG")
        self._shot = Shot(buffer.getvalue(), 640, 384, 0.0)

    async def setup(self, task: Task) -> object:
        return None

    async def screenshot(self) -> Shot:
        return self._shot

    async def step(self, actions: Sequence[GuiAction], action_id: str) -> Shot:
        return self._shot

    async def execute(self, action: CodeAction, action_id: str) -> ExecuteReply:
        return ExecuteReply(stdout="", stderr="", returncode=0)

    async def evaluate(self, task: Task, last_action: str | None) -> EvaluateReply:
        return EvaluateReply(score=1.0)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.from_config(
        REPO / "models/tiny_base", CONFIG.renderer, ActionSpace.from_config(CONFIG.action_space)
    )


async def recorded(task: Task, way: str, renderer: Renderer, folder: Path) -> list[Any]:
    """Prompts and answers of one demonstration, as training gets them."""

    def encode(action: Action) -> tuple[int, ...]:
        return renderer.answer_ids(format_action(action, CONFIG.action_space.family))

    runner = EpisodeRunner(CONFIG, renderer, context_policy(CONFIG.context), ImageStore(folder))
    teacher = ScriptedTeacher(task, config=TeacherConfig(route_weights={way: 1}))
    episode = await runner.run(
        task, GreyDesktop(), TeacherPolicy(teacher, encode), episode_id="e", group_id="g"
    )
    assert episode.is_valid and len(episode.turns) == len(task.metadata["routes"][way])
    return [(turn.context_ids, turn.context_images, turn.response_ids) for turn in episode.turns]


@pytest.mark.parametrize("family", FAMILIES)
async def test_prompts_and_answers_follow_from_instruction_screens_and_actions_alone(
    family: str, renderer: Renderer, tmp_path: Path
) -> None:
    """Judge, secret, set-up, ids, family, the other solutions and the wrong attempt change nothing."""
    for task in shipped("demonstrations", family)[:3]:
        for way, actions in task.metadata["routes"].items():
            bare = Task(
                id="another", instruction=task.instruction, metadata={"routes": {way: actions, "x": actions}}
            )
            assert await recorded(task, way, renderer, tmp_path) == await recorded(
                bare, way, renderer, tmp_path
            )


async def test_the_first_prompt_does_not_depend_on_the_solution(renderer: Renderer, tmp_path: Path) -> None:
    task = next(task for task in shipped("demonstrations", "theme") if len(task.metadata["routes"]) > 1)
    firsts = [(await recorded(task, way, renderer, tmp_path))[0] for way in task.metadata["routes"]]
    assert len({first[0] for first in firsts}) == 1 and len({first[2] for first in firsts}) == len(firsts)
