"""The scripted teacher: demonstrates tasks whose metadata holds solutions, as the starter tasks' does.

    metadata = {"routes": {way: [action, ...]}, "wrong": [action, ...]}     ways: gui, keys, bash, python, ...

It plays a script; it does not look at the screen. The policy never sees the metadata.
"""

from __future__ import annotations

from random import Random
from typing import Any

from pydantic import TypeAdapter, ValidationError

from slime_cua.config.run import TeacherConfig
from slime_cua.core.actions import Action, GuiAction, TerminateAction
from slime_cua.core.errors import TaskError
from slime_cua.core.types import Observation, Task

_ACTIONS: TypeAdapter[tuple[Action, ...]] = TypeAdapter(tuple[Action, ...])


class ScriptedTeacher:
    """One demonstration of one task. Deterministic in task, seed and config."""

    def __init__(self, task: Task, seed: int = 0, config: TeacherConfig | None = None) -> None:
        """Raises TaskError when the task's metadata holds no solution."""
        config = config or TeacherConfig()
        rng = Random(f"teacher {task.id} {seed}")
        routes = _routes(task)
        self.route = _choose(rng, list(routes), config.route_weights)
        """The way that is shown."""
        self.is_spoiled = rng.random() < config.error_rate
        """True when this episode is meant to score 0."""
        actions = routes[self.route]
        if self.is_spoiled:
            self.route = "wrong"
            actions = _spoil(rng, task, actions)
        self.actions: tuple[Action, ...] = tuple(
            step for action in actions for step in _with_detour(rng, action, config.detour_rate)
        )

    @property
    def num_turns(self) -> int:
        return len(self.actions)

    def next(self, observation: Observation | None, turn_index: int) -> Action:
        """The action of turn `turn_index` (0, 1, ...); the last one, a terminate, from then on."""
        return self.actions[min(turn_index, len(self.actions) - 1)]


def _routes(task: Task) -> dict[str, tuple[Action, ...]]:
    raw = task.metadata.get("routes")
    if not raw:
        raise TaskError(f"task {task.id}: metadata has no `routes`; the scripted teacher cannot show it")
    return {way: _parse(task, f"routes.{way}", actions) for way, actions in raw.items()}


def _parse(task: Task, name: str, raw: Any) -> tuple[Action, ...]:
    try:
        actions = _ACTIONS.validate_python(raw)
    except ValidationError as error:
        raise TaskError(f"task {task.id}: metadata.{name} is not a list of actions: {error}") from None
    if not actions or not isinstance(actions[-1], TerminateAction):
        raise TaskError(f"task {task.id}: metadata.{name} does not end with a terminate action")
    return actions


def _choose(rng: Random, ways: list[str], weights: dict[str, float]) -> str:
    chances = [weights.get(way, 0.0) for way in ways]
    return rng.choices(ways, chances)[0] if sum(chances) > 0 else ways[0]


def _spoil(rng: Random, task: Task, actions: tuple[Action, ...]) -> tuple[Action, ...]:
    wrong = task.metadata.get("wrong")
    if wrong and (len(actions) < 2 or rng.random() < 0.5):
        return _parse(task, "wrong", wrong)
    if len(actions) < 2:
        return (TerminateAction(status="success" if task.is_infeasible else "failure"),)
    return (*actions[:-2], actions[-1])


def _with_detour(rng: Random, action: Action, rate: float) -> tuple[Action, ...]:
    if rate and not isinstance(action, TerminateAction) and rng.random() < rate:
        return (GuiAction(kind="wait", time_s=0.1), action)
    return (action,)
