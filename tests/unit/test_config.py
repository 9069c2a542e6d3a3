"""Config: strict keys, named faults, extends, overrides."""

import pytest

from slime_cua.config.base import load, save_resolved
from slime_cua.config.run import RunConfig
from slime_cua.core.errors import ConfigError


def test_defaults_are_the_papers_where_it_gives_them():
    config = load(RunConfig)
    assert (config.rollout.groups_per_step, config.rollout.episodes_per_group) == (8, 8)
    assert (config.rollout.max_turns, config.rollout.sampling.temperature) == (50, 0.5)
    assert (config.sampler.target, config.sampler.sigma, config.sampler.retention) == (0.5, 0.25, 0.9)
    assert config.rollout.max_policy_lag == 1
    assert config.sandbox.screen_wh_px == (1504, 832)


def test_unknown_key_names_the_nearest_known_ones():
    with pytest.raises(ConfigError, match=r"unknown key trainer\.paralel; did you mean parallel"):
        load(RunConfig, None, ["trainer.paralel.tp=2"])


def test_bad_value_names_key_value_and_range():
    with pytest.raises(ConfigError, match=r"rollout\.max_policy_lag = -1: .*greater than or equal to 0"):
        load(RunConfig, None, ["rollout.max_policy_lag=-1"])


def test_child_file_wins_over_parent_and_override_over_both(tmp_path):
    (tmp_path / "base.yaml").write_text("seed: 1\nnum_steps: 5\ntrainer:\n  parallel: {tp: 2}\n")
    (tmp_path / "child.yaml").write_text("extends: base.yaml\nseed: 2\n")
    config = load(RunConfig, tmp_path / "child.yaml", ["num_steps=7"])
    assert (config.seed, config.num_steps, config.trainer.parallel.tp) == (2, 7, 2)


def test_environment_values_are_resolved_with_their_default(tmp_path, monkeypatch):
    monkeypatch.delenv("SLIME_CUA_TEST_SEED", raising=False)
    (tmp_path / "c.yaml").write_text("seed: ${oc.env:SLIME_CUA_TEST_SEED,4}\n")
    assert load(RunConfig, tmp_path / "c.yaml").seed == 4
    monkeypatch.setenv("SLIME_CUA_TEST_SEED", "9")
    assert load(RunConfig, tmp_path / "c.yaml").seed == 9


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("seed: [1", "not valid YAML"), ("- 1", "must be a mapping"), ("extends: a.yaml", "does not exist")],
)
def test_broken_files_are_named(tmp_path, text, sentence):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load(RunConfig, tmp_path / "c.yaml")


def test_circular_extends_is_an_error(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml")
    (tmp_path / "b.yaml").write_text("extends: a.yaml")
    with pytest.raises(ConfigError, match="circle"):
        load(RunConfig, tmp_path / "a.yaml")


def test_resolved_config_loads_back_equal(tmp_path):
    config = load(RunConfig, None, ["seed=3", "sandbox.screen_wh_px=[640,384]"])
    save_resolved(config, tmp_path / "config.yaml")
    assert load(RunConfig, tmp_path / "config.yaml") == config


def test_several_steps_a_collection_need_the_engines_log_probs():
    with pytest.raises(ConfigError, match=r"steps_per_collection = 2 needs loss\.pi_old = engine: proximal"):
        load(RunConfig, None, ["trainer.steps_per_collection=2", "loss.pi_old=proximal"])
    assert load(RunConfig, None, ["trainer.steps_per_collection=2"]).trainer.steps_per_collection == 2
