"""Generated traces: distributions in ScenarioConfig, every draw a function of (seed, task, occurrence)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollout.replay.scenario import ScenarioConfig
from rollout.replay.trace import EpisodeTrace, GroupTrace, TurnTrace

MAX_RESPONSE_TOKENS = 10240
TEXT_TOKENS = 100
"""Tokens around a screenshot and of a tool's text, a turn. Assumed."""
NUM_SPARES = 4
WINDOW, RETAIN = 10, 5
"""Screenshots in view, and how many a rewrite keeps (given)."""
SAMPLING_SHARE = 0.7
"""A turn's sampling takes at most so much of its time; longer responses are cut to it."""


@dataclass
class GeneratedTrace:
    """Draws go through permutations of the tasks, so no task is drawn twice among num_tasks."""

    config: ScenarioConfig
    name: str = ""
    _orders: dict[int, list[int]] = field(default_factory=dict)
    _groups: dict[tuple[str, int], GroupTrace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.config.name

    @property
    def task_ids(self) -> Sequence[str]:
        return tuple(f"task-{n:05d}" for n in range(self.config.tasks.num_tasks))

    def draw(self, index: int) -> str:
        """Task of the draw number `index`."""
        epoch, spot = divmod(index, self.config.tasks.num_tasks)
        if epoch not in self._orders:
            random = np.random.default_rng([self.config.seed, 1, epoch])
            self._orders[epoch] = random.permutation(self.config.tasks.num_tasks).tolist()
        return f"task-{self._orders[epoch][spot]:05d}"

    def group(self, task_id: str, occurrence: int) -> GroupTrace:
        """What the task's episodes do the `occurrence`-th time."""
        key = (task_id, occurrence)
        if key not in self._groups:
            self._groups[key] = self._group(task_id, occurrence)
        return self._groups[key]

    def _group(self, task_id: str, occurrence: int) -> GroupTrace:
        tasks, number = self.config.tasks, int(task_id.rsplit("-", 1)[1])
        own = np.random.default_rng([self.config.seed, 2, number])
        shift = tasks.task_sigma * own.standard_normal()
        turn_s = tasks.turn_s * math.exp(0.35 * own.standard_normal())
        random = np.random.default_rng([self.config.seed, 3, number, occurrence])
        count = self.config.episodes_per_group + NUM_SPARES
        return GroupTrace(task_id, tuple(self._episode(random, shift, turn_s) for _ in range(count)))

    def _episode(self, random: np.random.Generator, shift: float, turn_s: float) -> EpisodeTrace:
        tasks = self.config.tasks
        duration = self._duration(random, shift)
        num_turns = min(tasks.max_turns, max(1, round(duration / turn_s)))
        acts, responses = self._turns(random, duration, num_turns)
        odds = tasks.success_rate / (1 - tasks.success_rate) * 2 ** (-shift / math.log(2))
        reward = float(random.random() < odds / (1 + odds))
        is_failing = random.random() < tasks.failure_rate
        turns = self._traces(acts, responses)
        if is_failing:
            turns = turns[: 1 + int(random.random() * num_turns)]
        boot, setup, judge = np.exp(0.3 * random.standard_normal(3)).tolist()
        return EpisodeTrace(
            boot_s=tasks.boot_s * boot,
            setup_s=tasks.setup_s * setup,
            turns=turns,
            judge_s=0.0 if is_failing else tasks.judge_s * judge,
            reward=None if is_failing else reward,
            train_tokens=self._train_tokens(turns),
        )

    def _duration(self, random: np.random.Generator, shift: float) -> float:
        tasks = self.config.tasks
        for _ in range(100):
            seconds = tasks.median_s * math.exp(shift + tasks.episode_sigma * random.standard_normal())
            if tasks.min_s <= seconds <= tasks.max_s:
                return seconds
        return min(tasks.max_s, max(tasks.min_s, tasks.median_s * math.exp(shift)))

    def _turns(
        self, random: np.random.Generator, duration: float, num_turns: int
    ) -> tuple[list[float], list[int]]:
        """Desktop seconds and sampled tokens a turn, together `duration` on an idle engine."""
        site, tasks = self.config.site, self.config.tasks
        tokens = tasks.response_tokens * np.exp(0.9 * random.standard_normal(num_turns))
        tokens = np.clip(tokens, 8, MAX_RESPONSE_TOKENS)
        reading = num_turns * (tasks.screenshot_tokens + TEXT_TOKENS) / site.prefill_tokens_per_s
        most = SAMPLING_SHARE * duration
        sampling = float(tokens.sum()) * site.decode_s + reading
        if sampling > most:
            tokens = np.maximum(1, tokens * most / sampling)
            sampling = min(sampling, most)
        weights = np.exp(0.6 * random.standard_normal(num_turns))
        acts = (duration - sampling) * weights / weights.sum()
        return acts.tolist(), tokens.astype(int).tolist()

    def _traces(self, acts: list[float], responses: list[int]) -> tuple[TurnTrace, ...]:
        tasks = self.config.tasks
        shot = tasks.screenshot_tokens
        turns, text = [], tasks.prompt_tokens
        for index, (act, response) in enumerate(zip(acts, responses, strict=True)):
            text += TEXT_TOKENS
            is_rewrite = index >= WINDOW and (index - WINDOW) % (WINDOW - RETAIN + 1) == 0
            in_view = _in_view(index)
            prompt = text + in_view * shot
            new = prompt if index == 0 or is_rewrite else shot + TEXT_TOKENS
            turns.append(TurnTrace(new, prompt, response, act))
            text += response
        return tuple(turns)

    def _train_tokens(self, turns: tuple[TurnTrace, ...]) -> int:
        return sum(turn.new_tokens + turn.response_tokens for turn in turns)


def _in_view(index: int) -> int:
    """Screenshots in the prompt of turn `index`: 1..10, then 5..10 again and again."""
    return index + 1 if index < WINDOW else RETAIN + (index - WINDOW) % (WINDOW - RETAIN + 1)
