"""What a batch of groups says about the policy: names as in observability.metrics, values over valid episodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from slime_cua.core.types import Episode, EpisodeGroup

EFFECTIVE = ("gui", "code", "mcp")
"""Step types that act on the desktop; the code-action rate is code over these."""


def behaviour(episodes: Sequence[Episode]) -> dict[str, float]:
    """turns_mean, code_action_rate, action_rate/TYPE, format_error_rate, response_tokens_mean of valid episodes."""
    valid = [episode for episode in episodes if episode.is_valid]
    turns = [turn for episode in valid for turn in episode.turns]
    types: Counter[str] = Counter(turn.step_type for turn in turns)
    effective = sum(types[name] for name in EFFECTIVE)
    values = {
        "turns_mean": len(turns) / max(1, len(valid)),
        "code_action_rate": types["code"] / max(1, effective),
        "format_error_rate": types["format_error"] / max(1, len(turns)),
        "response_tokens_mean": sum(len(turn.response_ids) for turn in turns) / max(1, len(turns)),
    }
    return values | {f"action_rate/{name}": count / len(turns) for name, count in types.items()}


def batch_metrics(
    groups: Sequence[EpisodeGroup], family_of: Mapping[str, str], version: int
) -> dict[str, float]:
    """Everything about the groups of one step trained by the weights of `version`."""
    episodes = [episode for group in groups for episode in group.episodes]
    valid = [episode for episode in episodes if episode.is_valid]
    scores: dict[str, list[float]] = defaultdict(list)
    for episode in valid:
        scores[family_of[episode.task_id]].append(episode.reward or 0.0)
    flat = [score for values in scores.values() for score in values]
    values = {
        "reward/mean": sum(flat) / max(1, len(flat)),
        "rollout/num_episodes": float(len(episodes)),
        "rollout/num_invalid": float(len(episodes) - len(valid)),
        "rollout/zero_variance_share": sum(map(_is_flat, groups)) / max(1, len(groups)),
    }
    values |= {f"reward/family/{name}": sum(v) / len(v) for name, v in scores.items()}
    values |= {f"rollout/{name}": value for name, value in behaviour(episodes).items()}
    return values | _lag(valid, version)


def _is_flat(group: EpisodeGroup) -> bool:
    rewards = [episode.reward for episode in group.episodes if episode.is_valid]
    return len(set(rewards)) < 2


def _lag(episodes: Sequence[Episode], version: int) -> dict[str, float]:
    ages: Counter[int] = Counter()
    spanning = 0
    for episode in episodes:
        seen = Counter(version - v for turn in episode.turns for v in turn.response_versions)
        spanning += len(seen) > 1
        ages += seen
    total = sum(ages.values())
    if not total:
        return {}
    values = {f"lag/share/{age}": count / total for age, count in ages.items()}
    return values | {
        "lag/max": float(max(ages)),
        "lag/mean": sum(age * count for age, count in ages.items()) / total,
        "lag/span_share": spanning / len(episodes),
    }
