"""Loss, advantages, sampler. Defaults and their sources: docs/algorithm.md."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_cua.config.base import ConfigModel


class LossConfig(ConfigModel):
    name: Literal["gspo", "grpo", "dapo", "cispo"] = "gspo"
    aggregate: Literal["step", "token"] = "step"
    """`step`: step-balanced GSPO (OS-Helix). `token`: standard GSPO."""
    pi_old: Literal["engine", "proximal", "behaviour"] = "engine"
    eps_low: float = Field(5e-4, gt=0)
    eps_high: float = Field(7e-4, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    step_weights: dict[str, float] = {
        "gui": 1.0,
        "code": 1.0,
        "mcp": 1.0,
        "skill": 1.0,
        "terminate": 1.0,
        "format_error": 1.0,
    }
    kl: Literal["k1", "k2", "k3"] | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


class AdvantageConfig(ConfigModel):
    name: Literal["group_norm", "mean_only", "leave_one_out", "positive_only"] = "group_norm"
    min_std: float = 1e-4
    """Below it every episode's advantage is exactly 0."""
    format_error_min_std: float = 0.25
    format_error_floor: float = -2.0
    segment_weight: Literal["segment", "episode"] = "segment"
    """`segment`: each segment counts 1. `episode`: 1 / number of segments of its episode."""
    is_shuffled: bool = False
    """Control arm: advantages permuted over the batch; must learn nothing."""


class FrontierConfig(ConfigModel):
    name: Literal["frontier", "uniform"] = "frontier"
    target: float = Field(0.5, ge=0, le=1)
    sigma: float = Field(0.25, gt=0)
    retention: float = Field(0.9, ge=0, lt=1)
    min_weight: float = Field(0.05, ge=0, le=1)
    uniform_mix: float = Field(0.2, ge=0, le=1)
