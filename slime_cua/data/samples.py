"""From finished groups to training samples: segments with advantages and weights (I2, I4)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from slime_cua.algo.advantages import group_advantages, segment_weights
from slime_cua.config.algo import AdvantageConfig
from slime_cua.core.types import EpisodeGroup, TrainSample
from slime_cua.data.segments import build_segments


def make_train_samples(
    groups: Sequence[EpisodeGroup], config: AdvantageConfig, *, seed: int = 0, oldest_version: int = 0
) -> list[TrainSample]:
    """Samples of all valid episodes, in the order of groups and episodes.

    An invalid episode gives none: it is out of the loss, the baseline and every count (its format errors too).
    A segment inherits its episode's advantage and reward; a format-error segment gets its own, with reward 0.
    seed: of the permutation when config.is_shuffled (the control arm).
    oldest_version: responses with a token of a lower version are context only; their episodes' rewards still count.
    """
    samples = [sample for group in groups for sample in _group_samples(group, config, oldest_version)]
    if not config.is_shuffled:
        return samples
    advantages = [sample.advantage for sample in samples]
    random.Random(seed).shuffle(advantages)
    return [
        sample.model_copy(update={"advantage": advantage})
        for sample, advantage in zip(samples, advantages, strict=True)
    ]


def _group_samples(group: EpisodeGroup, config: AdvantageConfig, oldest_version: int) -> list[TrainSample]:
    segments_G = [
        build_segments(episode, oldest_version) if episode.is_valid else [] for episode in group.episodes
    ]
    num_format_errors = sum(segment.is_format_error for segments in segments_G for segment in segments)
    rewards = [episode.reward if episode.is_valid else None for episode in group.episodes]
    result = group_advantages(rewards, config, num_format_errors=num_format_errors)
    samples = []
    for episode, segments, advantage in zip(group.episodes, segments_G, result.episode_G, strict=True):
        if advantage is None or not segments:
            continue
        weights = segment_weights([len(segment.step_types) for segment in segments], config.segment_weight)
        for segment, weight in zip(segments, weights, strict=True):
            samples.append(
                TrainSample(
                    segment=segment,
                    advantage=result.format_error if segment.is_format_error else advantage,
                    sample_weight=weight,
                    reward=0.0 if segment.is_format_error else episode.reward,
                )
            )
    return samples


def split_samples(
    samples: Sequence[TrainSample], num_parts: int, *, seed: int = 0
) -> list[list[TrainSample]]:
    """The samples in `num_parts` shares of equal size (differing by at most one), drawn at random from all groups.

    Samples with advantage 0 are spread like the others, so each share's mean over its samples estimates the same loss.
    One part keeps the order. Fewer samples than parts give fewer shares, none empty (one, if there are no samples).
    """
    if num_parts == 1:
        return [list(samples)]
    mixed = random.Random(f"share {seed}").sample(list(samples), len(samples))
    return [mixed[i::num_parts] for i in range(min(num_parts, max(len(mixed), 1)))]
