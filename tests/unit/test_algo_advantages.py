"""Group advantages: hand-worked numbers, invalid members, flat groups, format errors."""

import math
import random

import pytest

from slime_cua.algo.advantages import group_advantages, pass_at_k_advantages, segment_weights
from slime_cua.config.algo import AdvantageConfig

EXACT = AdvantageConfig(std_eps=0.0)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, None, 1.0], [0.5773502691896257, -1.1547005383792512, None, 0.5773502691896257]),
        ([None, -1.0, -1.0, None], [None, 0.0, 0.0, None]),
        ([None, None, None, 1.0], [None, None, None, 0.0]),
        ([math.nan, 1.0, 0.0, 0.0], [None, 1.1547005383792515, -0.5773502691896256, -0.5773502691896256]),
    ],
)
def test_invalid_members_leave_mean_deviation_and_loss(rewards, expected):
    result = group_advantages(rewards, EXACT).episode_G
    assert [value is None for value in result] == [value is None for value in expected]
    for value, wanted in zip(result, expected, strict=True):
        assert value is None or value == pytest.approx(wanted, abs=1e-12)


def test_the_default_adds_a_millionth_to_the_deviation():
    result = group_advantages([1.0, 0.0], AdvantageConfig())
    assert result.episode_G[0] == 0.5 / (math.sqrt(0.5) + 1e-6)
    assert (result.mean, result.num_valid, result.is_informative) == (0.5, 2, True)


@pytest.mark.parametrize(
    "rewards", [[], [0.7], [None, 0.7], [0.3] * 8, [0.1 + 0.2, 0.3, 0.3], [0.5, 0.5 + 1e-5], [None, math.nan]]
)
@pytest.mark.parametrize("name", ["group_norm", "mean_only", "leave_one_out", "positive_only", "pass_at_k"])
def test_groups_of_one_and_equal_rewards_give_exact_zeros(name, rewards):
    result = group_advantages(rewards, AdvantageConfig(name=name))
    assert all(value is None or value == 0.0 for value in result.episode_G)
    assert not result.is_informative


@pytest.mark.parametrize("rewards", [[0.7] * 7, [0.1 + 0.2, 0.3], [0.3, 0.3, math.nextafter(0.3, 1.0)]])
@pytest.mark.parametrize("name", ["group_norm", "mean_only", "leave_one_out", "positive_only", "pass_at_k"])
def test_rewards_equal_up_to_the_last_bit_give_exact_zeros_without_any_threshold(name, rewards):
    config = AdvantageConfig(name=name, min_std=0.0, std_eps=0.0)
    assert group_advantages(rewards, config).episode_G == (0.0,) * len(rewards)


def test_all_invalid_groups_give_no_format_error_advantage():
    assert group_advantages([None, math.nan], AdvantageConfig(), num_format_errors=3).format_error == 0.0


def test_mean_only_and_leave_one_out_by_hand():
    rewards = [1.0, 0.5, 0.0]
    assert group_advantages(rewards, AdvantageConfig(name="mean_only")).episode_G == (0.5, 0.0, -0.5)
    leave_one_out = group_advantages(rewards, AdvantageConfig(name="leave_one_out")).episode_G
    assert leave_one_out == pytest.approx((0.75, 0.0, -0.75))
    # n / (n - 1) times mean_only
    assert leave_one_out == pytest.approx([1.5 * value for value in (0.5, 0.0, -0.5)])


def test_positive_only_keeps_what_is_above_the_mean():
    assert group_advantages([1.0, 0.0], AdvantageConfig(name="positive_only", std_eps=0.0)).episode_G == (
        pytest.approx(1 / math.sqrt(2)),
        0.0,
    )


def test_pass_at_k_by_hand_and_pass_at_1_is_population_normalisation():
    # n = 4, one success, k = 2: R = 1 - C(3,2)/C(4,2) = 0.5, s = 0.5; up = 1; down = (0.5 - C(2,1)/C(3,1)) / 0.5 = -1/3
    assert pass_at_k_advantages([True, False, False, False], 2) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    # k = 1: (1 - p) / sqrt(p (1 - p)) and -p / sqrt(p (1 - p)) with p = 1/4
    assert pass_at_k_advantages([True, False, False, False], 1) == pytest.approx(
        [0.75 / math.sqrt(3 / 16)] + [-0.25 / math.sqrt(3 / 16)] * 3
    )
    with pytest.raises(ValueError, match="k >= 1"):
        pass_at_k_advantages([True], 0)


def test_pass_at_k_equals_the_average_over_all_draws():
    """Each draw of k episodes is one group with reward max; its normalised reward is shared by its members."""
    import itertools

    is_success, k = [True, True, False, False, False], 3
    draws = list(itertools.combinations(range(5), k))
    rewards = [float(any(is_success[i] for i in draw)) for draw in draws]
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    for i, value in enumerate(pass_at_k_advantages(is_success, k)):
        mine = [(r - mean) / spread for r, draw in zip(rewards, draws, strict=True) if i in draw]
        assert value == pytest.approx(sum(mine) / len(mine))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0], -0.5 / math.sqrt(0.5)),
        ([1.0, 1.0], -2.0),
        ([0.2, 0.2], -0.8),
        ([0.0, 0.0], 0.0),
        ([0.3], -1.2),
        ([1.0, None], -2.0),
    ],
)
def test_a_format_error_gets_its_share_below_the_mean_also_in_flat_groups(rewards, expected):
    assert group_advantages(rewards, AdvantageConfig()).format_error == pytest.approx(expected)


def test_format_errors_enter_mean_and_deviation_only_with_the_flag():
    without = group_advantages([1.0, 1.0], AdvantageConfig(), num_format_errors=2)
    assert (without.mean, without.std, without.episode_G) == (1.0, 0.0, (0.0, 0.0))
    config = AdvantageConfig(has_format_errors_in_baseline=True)
    with_them = group_advantages([1.0, 1.0], config, num_format_errors=2)
    assert with_them.mean == 0.5 and with_them.std == pytest.approx(math.sqrt(1 / 3))
    assert with_them.episode_G[0] == pytest.approx(0.5 / math.sqrt(1 / 3), rel=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_group_norm_has_mean_zero_and_deviation_one_and_ignores_shift_and_scale(seed):
    rng = random.Random(seed)
    rewards = [rng.random() for _ in range(rng.randint(2, 16))]
    result = group_advantages(rewards, EXACT).episode_G
    assert math.fsum(result) == pytest.approx(0, abs=1e-9)
    assert math.fsum(value**2 for value in result) == pytest.approx(len(rewards) - 1)
    moved = group_advantages([3 + 2 * reward for reward in rewards], EXACT).episode_G
    assert moved == pytest.approx(result)


def test_segment_weights_by_segment_by_episode_and_by_share_of_steps():
    assert segment_weights([3, 1], "segment") == [1.0, 1.0]
    assert segment_weights([3, 1], "episode") == [0.5, 0.5]
    # the share of a step is weight / K in a step-balanced loss: 1 / T for each of the four
    shares = segment_weights([3, 1], "step_share")
    assert shares == [0.75, 0.25] and [shares[0] / 3, shares[1] / 1] == [0.25, 0.25]
    assert all(segment_weights([], rule) == [] for rule in ("segment", "episode", "step_share"))
    with pytest.raises(ValueError, match="must be"):
        segment_weights([1], "turn")
