"""Loss, advantages, sampler. Formulas, defaults and their sources: docs/algorithm.md."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from slime_cua.config.base import ConfigModel


class LossConfig(ConfigModel):
    name: Literal["gspo", "grpo", "dapo", "cispo"] = "gspo"
    aggregate: Literal["step", "token"] = "step"
    """`step`: every action step weighs by its type's weight (OS-Helix). `token`: the loss's published form, by tokens."""
    pi_old: Literal["engine", "proximal", "behaviour"] = "engine"
    """Whose log-probs are the ratio's denominator; what each means: docs/algorithm.md."""
    eps_low: float = Field(5e-4, gt=0)
    """Token-level losses want about 0.2."""
    eps_high: float = Field(7e-4, gt=0)
    """Token-level losses want about 0.28."""
    dual_clip: float | None = Field(None, gt=1)
    step_weights: dict[str, float] = {
        "gui": 1.0,
        "code": 1.0,
        "mcp": 1.0,
        "skill": 1.0,
        "terminate": 1.0,
        "format_error": 1.0,
    }
    """alpha of each action type; at least one positive in every sample."""
    kl: Literal["k1", "k2", "k3"] | None = None
    kl_coef: float = Field(0.0, ge=0)
    entropy_coef: float = Field(0.0, ge=0)
    correction_cap: float = Field(2.0, gt=0)
    """Upper bound of the truncated importance correction (pi_old = proximal)."""
    off_policy_max_gap: float | None = Field(None, gt=0)
    """Negative-advantage segments whose mean log(old/new) is above this leave the loss; null: off."""

    @model_validator(mode="after")
    def _used(self) -> LossConfig:
        if self.name == "cispo" and self.dual_clip is not None:
            raise ValueError("cispo does not use dual_clip: set it to null or choose gspo, grpo or dapo")
        if self.kl is not None and self.kl_coef == 0.0:
            raise ValueError(f"kl = {self.kl} has no effect with kl_coef 0: set kl_coef or kl: null")
        if self.kl is None and self.kl_coef != 0.0:
            raise ValueError(f"kl_coef = {self.kl_coef} has no effect without kl: set kl to k1, k2 or k3")
        if any(weight < 0 for weight in self.step_weights.values()):
            raise ValueError("step_weights must be >= 0")
        return self


class AdvantageConfig(ConfigModel):
    name: Literal["group_norm", "mean_only", "leave_one_out", "positive_only", "pass_at_k"] = "group_norm"
    min_std: float = Field(1e-4, ge=0)
    """Below it every episode's advantage is exactly 0."""
    std_eps: float = Field(1e-6, ge=0)
    """Added to the deviation that group_norm divides by."""
    pass_k: int = Field(4, ge=1)
    success_threshold: float = 0.5
    """A score above it is a success, for pass_at_k."""
    has_format_errors_in_baseline: bool = False
    """Format-error samples enter the group's mean and deviation as rewards of 0."""
    format_error_min_std: float = Field(0.25, gt=0)
    format_error_floor: float = Field(-2.0, le=0)
    segment_weight: Literal["segment", "episode", "step_share"] = "segment"
    """`segment`: each counts 1. `episode`: 1 / number of the episode's segments. `step_share`: its share of the steps."""
    is_shuffled: bool = False
    """Control arm: advantages permuted over the batch; must learn nothing."""


class FrontierConfig(ConfigModel):
    name: Literal["frontier", "uniform", "weighted_classes", "difficulty_bands"] = "frontier"
    target: float = Field(0.5, ge=0, le=1)
    """Success rate with the largest weight."""
    sigma: float = Field(0.25, gt=0)
    retention: float = Field(0.9, ge=0, lt=1)
    """Share of the old estimate kept at an update: p <- a p + (1 - a) mean(new)."""
    start: Literal["half", "family"] = "half"
    """Estimate of a task never tried: 0.5, or the average of its family (`metadata.family`) so far."""
    min_weight: float = Field(0.05, ge=0, le=1)
    uniform_mix: float = Field(0.2, ge=0, le=1)
    """Share of uniform draws; above 0, no task starves."""
    success_threshold: float | None = None
    """null: a success is the episode's score in [0, 1]. Else: score above it."""
    band: tuple[float, float] = (0.2, 0.8)
    """Success rates inside the band of difficulty_bands."""
    class_weights: dict[str, float] = {"skill_rescue": 3.5, "fallback": 1.75, "direct": 1.0, "uncovered": 0.5}
    """For weighted_classes (MMSkill-RL's step labels)."""
