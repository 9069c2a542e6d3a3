"""Advantages over the episodes of a group, never over segments. Plain Python, one group at a time.

Legend: G episodes of a group, valid ones only in mean and deviation; n of them are valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime_cua.config.algo import AdvantageConfig

Rewards = Sequence[float | None]
ROUNDING = 1e-14
"""Relative deviation that is rounding, not a difference, whatever min_std is: equal up to the last bits."""


@dataclass(frozen=True)
class GroupAdvantages:
    """What one group's rewards say."""

    episode_G: tuple[float | None, ...]
    """None: the episode is invalid and stays out of the loss."""
    format_error: float
    """Advantage of a response without a valid action, in any valid episode of the group; its reward is 0."""
    mean: float
    std: float
    """Sample deviation (n - 1) over valid rewards; 0 if fewer than two."""
    num_valid: int

    @property
    def is_informative(self) -> bool:
        """Some episode has an advantage other than 0."""
        return any(value for value in self.episode_G)


def is_valid_reward(reward: float | None) -> bool:
    """A number. None, NaN and infinities are missing scores, not scores."""
    return reward is not None and math.isfinite(reward)


def group_advantages(
    reward_G: Rewards, config: AdvantageConfig, *, num_format_errors: int = 0
) -> GroupAdvantages:
    """Advantages of one group.

        mean, std over valid rewards, std with n - 1;   fewer than two valid or std < min_std or only rounding: exactly 0 for everybody
        group_norm      (r - mean) / (std + std_eps)                      GRPO, arXiv:2402.03300
        mean_only       r - mean                                          Dr. GRPO, arXiv:2503.20783
        leave_one_out   r - mean of the others = n / (n - 1) (r - mean)   RLOO, arXiv:2402.14740
        positive_only   max(0, group_norm)                                hybrid-routing-agent
        pass_at_k       see pass_at_k_advantages
        format error    max((0 - mean) / max(std, format_error_min_std), format_error_floor), also where the others get 0;
                        mean_only and leave_one_out do not divide; positive_only gives 0
    reward_G: None or NaN marks an invalid episode: out of everything.
    num_format_errors: responses without a valid action in the group's valid episodes; they enter mean and std as
        rewards of 0 only with config.has_format_errors_in_baseline.
    """
    valid = [float(reward) for reward in reward_G if reward is not None and is_valid_reward(reward)]
    pool = valid + [0.0] * num_format_errors if config.has_format_errors_in_baseline and valid else valid
    mean, std = mean_and_std(pool)
    is_flat = len(valid) < 2 or std < config.min_std or std <= ROUNDING * max(map(abs, pool))
    advantages = [0.0] * len(valid) if is_flat else _FORMS[config.name](valid, mean, std, config)
    values = iter(advantages)
    episode_G = tuple(next(values) if is_valid_reward(reward) else None for reward in reward_G)
    return GroupAdvantages(episode_G, _format_error(mean, std, config, bool(valid)), mean, std, len(valid))


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """(mean, sample deviation with n - 1), exactly rounded sums; (0, 0) for no value, std 0 for one."""
    if not values:
        return 0.0, 0.0
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def pass_at_k_advantages(is_success_G: Sequence[bool], k: int) -> list[float]:
    """Advantage of each episode when the reward is "one of k drawn without replacement succeeds", averaged over draws.

        R = 1 - C(f, k) / C(n, k) for f failures of n;   s = sqrt(R (1 - R))
        success: (1 - R) / s;   failure: (1 - R - C(f - 1, k - 1) / C(n - 1, k - 1)) / s;   all 0 where s = 0
    k above n counts as n. Raises ValueError for k < 1. Source: Pass@k training, arXiv:2508.10751.
    """
    if k < 1:
        raise ValueError(f"pass@k needs k >= 1, not {k}")
    total = len(is_success_G)
    k = min(k, total)
    failures = total - sum(is_success_G)
    if total == 0:
        return []
    reach = 1.0 - math.comb(failures, k) / math.comb(total, k)
    spread = math.sqrt(reach * (1.0 - reach))
    if spread == 0.0:
        return [0.0] * total
    up = (1.0 - reach) / spread
    down = (
        (1.0 - reach - math.comb(failures - 1, k - 1) / math.comb(total - 1, k - 1)) / spread
        if failures
        else 0.0
    )
    return [up if is_success else down for is_success in is_success_G]


def segment_weights(num_steps_S: Sequence[int], rule: str) -> list[float]:
    """Sample weights of one episode's segments.

    `segment`: 1 each (the paper: L over samples). `episode`: 1 / number of segments, so an episode counts 1.
    `step_share`: K_i / T with T steps in the episode, so each step has 1 / T of the return (with step-balanced losses).
    Raises ValueError for another rule.
    """
    if rule == "segment":
        return [1.0] * len(num_steps_S)
    if rule == "episode":
        return [1.0 / len(num_steps_S) for _ in num_steps_S]
    if rule == "step_share":
        total = sum(num_steps_S)
        return [steps / total for steps in num_steps_S] if total else [0.0] * len(num_steps_S)
    raise ValueError(f'segment_weight {rule!r} must be "segment", "episode" or "step_share"')


def _group_norm(valid: list[float], mean: float, std: float, config: AdvantageConfig) -> list[float]:
    return [(reward - mean) / (std + config.std_eps) for reward in valid]


def _mean_only(valid: list[float], mean: float, std: float, config: AdvantageConfig) -> list[float]:
    return [reward - mean for reward in valid]


def _leave_one_out(valid: list[float], mean: float, std: float, config: AdvantageConfig) -> list[float]:
    total = math.fsum(valid)
    return [reward - (total - reward) / (len(valid) - 1) for reward in valid]


def _positive_only(valid: list[float], mean: float, std: float, config: AdvantageConfig) -> list[float]:
    return [max(0.0, value) for value in _group_norm(valid, mean, std, config)]


def _pass_at_k(valid: list[float], mean: float, std: float, config: AdvantageConfig) -> list[float]:
    return pass_at_k_advantages([reward > config.success_threshold for reward in valid], config.pass_k)


_FORMS: dict[str, Callable[[list[float], float, float, AdvantageConfig], list[float]]] = {
    "group_norm": _group_norm,
    "mean_only": _mean_only,
    "leave_one_out": _leave_one_out,
    "positive_only": _positive_only,
    "pass_at_k": _pass_at_k,
}


def _format_error(mean: float, std: float, config: AdvantageConfig, has_valid: bool) -> float:
    if not has_valid or config.name == "positive_only":
        return 0.0
    scale = 1.0 if config.name in ("mean_only", "leave_one_out") else max(std, config.format_error_min_std)
    return max((0.0 - mean) / scale, config.format_error_floor)
