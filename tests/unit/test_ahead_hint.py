"""A run whose episodes outlast its steps is told which key helps; one that waits for nothing, or has set it, is not."""

import pytest

from slime_cua.config.rollout import RolloutConfig, SchedulerConfig
from slime_cua.core.types import Episode, EpisodeGroup
from slime_cua.launch.ahead_hint import NUM_STEPS, AheadHint


def group(*seconds: float) -> EpisodeGroup:
    """A group whose valid attempts took so long; an invalid one took much longer."""
    episodes = [
        Episode(
            episode_id=f"g-e{n}",
            group_id="g",
            task_id="t",
            turns=(),
            reward=0.0 if n else None,
            stop_reason="terminated" if n else "invalid",
            error=None if n else "SandboxError: gone",
            started_s=50.0,
            ended_s=50.0 + took_s,
        )
        for n, took_s in enumerate((9e9, *seconds))
    ]
    return EpisodeGroup(group_id="g", task_id="t", episodes=tuple(episodes), admitted_version=0)


def lines(group_s, work_s, wait_s, *, num_tasks=100, num_ahead=0, num_steps=3 * NUM_STEPS):
    config = RolloutConfig(groups_per_step=8, scheduler=SchedulerConfig(num_ahead_groups=num_ahead))
    hint = AheadHint(config, num_tasks)
    values = {"time/train_s": work_s - 8.0, "time/publish_s": 8.0, "time/wait_s": wait_s}
    return [hint.note([group(10.0, group_s), group(group_s, 1.0)], values) for _ in range(num_steps)]


def test_it_is_said_once_after_some_steps_with_key_value_and_what_was_measured():
    said = lines(670.0, 265.0, 735.0)
    assert [bool(line) for line in said] == [n == NUM_STEPS - 1 for n in range(len(said))]
    for part in ("a group took 670 s", "train and publish 265 s", "waited 74% of the time"):
        assert part in said[NUM_STEPS - 1]
    assert "rollout.scheduler.num_ahead_groups is 0; 64 (8 x groups_per_step)" in said[NUM_STEPS - 1]


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ((200.0, 265.0, 735.0), {}),
        ((670.0, 265.0, 10.0), {}),
        ((670.0, 265.0, 735.0), {"num_ahead": 16}),
        ((670.0, 265.0, 735.0), {"num_tasks": 63}),
        ((670.0, 265.0, 735.0), {"num_steps": NUM_STEPS - 1}),
    ],
    ids=["episodes are short", "nothing waits", "set already", "small pool", "too early"],
)
def test_otherwise_nothing_is_said(numbers, named):
    assert not any(lines(*numbers, **named))
