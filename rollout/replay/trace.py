"""Traces: which task is drawn when, and what each of its episodes does. Recorded from a run, or generated."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollout.replay.scenario import ScenarioConfig
from slime_cua.config.base import load
from slime_cua.config.run import RunConfig
from slime_cua.core.errors import DataError
from slime_cua.core.types import Episode, EpisodeGroup, Turn
from slime_cua.data.episodes import EpisodeStore


@dataclass(frozen=True, slots=True)
class TurnTrace:
    """One request and what the desktop did then."""

    new_tokens: int
    """Tokens that the engine has to read when it knows the earlier ones."""
    prompt_tokens: int
    """Tokens to read when it knows none, as after new weights."""
    response_tokens: int
    act_s: float


@dataclass(frozen=True, slots=True)
class EpisodeTrace:
    """One attempt. `reward` None: it ends by an infrastructure failure after its turns."""

    boot_s: float
    setup_s: float
    turns: tuple[TurnTrace, ...]
    judge_s: float
    reward: float | None
    train_tokens: int
    """Tokens of its segments, re-rendered history included."""

    @property
    def response_tokens(self) -> int:
        return sum(turn.response_tokens for turn in self.turns)

    def span_s(self, token_s: float, read_s: float = 0.0) -> float:
        """Least time from its first sampled token to its end: `token_s` a sampled token, `read_s` a prompt token."""
        read = sum(turn.new_tokens for turn in self.turns[1:])
        acted_s = sum(turn.act_s for turn in self.turns)
        return self.response_tokens * token_s + read * read_s + acted_s + self.judge_s


@dataclass(frozen=True)
class GroupTrace:
    """All attempts of a group: the first episodes_per_group, then spares for retries and over-sampling."""

    task_id: str
    episodes: tuple[EpisodeTrace, ...]

    def attempt(self, number: int) -> EpisodeTrace:
        return self.episodes[number % len(self.episodes)]


class Trace(Protocol):
    """Same draws and same episodes for every policy: a group is what its task does the k-th time it is drawn."""

    @property
    def name(self) -> str: ...
    @property
    def task_ids(self) -> Sequence[str]: ...
    def draw(self, index: int) -> str: ...
    def group(self, task_id: str, occurrence: int) -> GroupTrace: ...


def drawn_groups(trace: Trace, count: int) -> list[GroupTrace]:
    """The first `count` groups in the order of their draw."""
    seen: Counter[str] = Counter()
    groups = []
    for index in range(count):
        task_id = trace.draw(index)
        groups.append(trace.group(task_id, seen[task_id]))
        seen[task_id] += 1
    return groups


@dataclass
class RecordedTrace:
    """Groups of a run in the order of their admission; after the last one the first comes again."""

    groups: list[GroupTrace]
    name: str = "recorded"
    _of_task: dict[str, list[GroupTrace]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for group in self.groups:
            self._of_task.setdefault(group.task_id, []).append(group)

    @property
    def task_ids(self) -> Sequence[str]:
        return tuple(self._of_task)

    def draw(self, index: int) -> str:
        return self.groups[index % len(self.groups)].task_id

    def group(self, task_id: str, occurrence: int) -> GroupTrace:
        groups = self._of_task[task_id]
        return groups[occurrence % len(groups)]


def read_trace(path: Path) -> RecordedTrace:
    """The trace of a run directory (its episodes/rl.jsonl) or of one episodes file.

    Raises DataError when there is no group with an episode that has turns.
    """
    file = episodes_file(path)
    recorded = sorted(EpisodeStore(file), key=lambda group: group.group_id)
    groups = [trace for trace in map(recorded_group, recorded) if trace is not None]
    if not groups:
        raise DataError(f"{file}: no episode with turns is recorded there")
    return RecordedTrace(groups, name=str(path))


def episodes_file(path: Path) -> Path:
    """Of a run directory its training episodes, or the file itself."""
    return path / "episodes" / "rl.jsonl" if path.is_dir() else path


def measured_scenario(scenario: ScenarioConfig, path: Path) -> ScenarioConfig:
    """The scenario with what the run at `path` measured (time a sampled token, episodes a group, step and publish times) and,
    of a run directory, what its config says: desktops and groups a step.

    A token's time holds what the run's load made of it, so requests do not slow each other further in the replay.
    """
    groups = EpisodeStore(episodes_file(path)).read()
    site: dict[str, Any] = {
        "decode_s": measured_token_s(groups),
        "decode_s_per_request": 0.0,
        "prefill_tokens_per_s": 1e12,
        "num_engines": 1,
        "max_batch": 100_000,
    }
    metrics = path / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    for field_name, metric in (("step_s", "time/train_s"), ("publish_s", "time/publish_s")):
        values = [row["values"][metric] for row in rows if metric in row.get("values", {})]
        if values and sum(values) > 0:
            site[field_name] = sum(values) / len(values)
    update: dict[str, Any] = {}
    if (path / "config.yaml").is_file():
        config = load(RunConfig, path / "config.yaml", [])
        site["num_desktops"] = config.sandbox.num_desktops
        update["groups_per_step"] = config.rollout.groups_per_step
    count = max(2, min(len(group.episodes) for group in groups)) if groups else scenario.episodes_per_group
    update |= {"site": scenario.site.model_copy(update=site), "episodes_per_group": count}
    return scenario.model_copy(update=update)


def recorded_group(group: EpisodeGroup) -> GroupTrace | None:
    """None for a group without turns. Attempts that were cut off are left out: what they would have done is unknown."""
    episodes = [_recorded(e) for e in group.episodes if e.turns and e.stop_reason != "cancelled"]
    return GroupTrace(group.task_id, tuple(episodes)) if episodes else None


def _recorded(episode: Episode) -> EpisodeTrace:
    timed = sum(sum(turn.timings_s.values()) for turn in episode.turns)
    rest_s = max(0.0, episode.ended_s - episode.started_s - timed)
    return EpisodeTrace(
        boot_s=0.0,
        setup_s=episode.turns[0].timings_s.get("setup", 0.0),
        turns=tuple(_recorded_turns(episode.turns)),
        judge_s=rest_s,
        reward=episode.reward if episode.is_valid else None,
        train_tokens=sum(len(turn.context_ids) + len(turn.response_ids) for turn in episode.turns),
    )


def _recorded_turns(turns: Iterable[Turn]) -> Iterable[TurnTrace]:
    prompt = 0
    for turn in turns:
        prompt = len(turn.context_ids) + (0 if turn.starts_segment else prompt)
        yield TurnTrace(
            new_tokens=len(turn.context_ids),
            prompt_tokens=prompt,
            response_tokens=len(turn.response_ids),
            act_s=turn.timings_s.get("act", 0.0),
        )
        prompt += len(turn.response_ids)


def measured_token_s(groups: Iterable[EpisodeGroup]) -> float:
    """Seconds a sampled token took in a run: all time of requests over all tokens. DataError without any."""
    seconds, tokens = 0.0, 0
    for group in groups:
        for episode in group.episodes:
            for turn in episode.turns:
                seconds += turn.timings_s.get("generate", 0.0)
                tokens += len(turn.response_ids)
    if not tokens:
        raise DataError("no sampled token is recorded")
    return seconds / tokens
