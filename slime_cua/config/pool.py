"""Which candidate tasks become a training pool."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from slime_cua.config.base import ConfigModel


class PoolConfig(ConfigModel):
    """`slime-cua pool build`. Source: OS-Helix B.4, "keeping tasks of moderate difficulty"; the numbers are ours."""

    num_attempts: int = Field(8, ge=1)
    """Episodes a candidate task, k."""
    min_valid_attempts: int = Field(4, ge=1)
    """With fewer that the judge scored, a task's pass rate is not known and the task is left out."""
    success_threshold: float = Field(0.5, ge=0, lt=1)
    """An attempt passes with a score above it."""
    min_pass_rate: float = Field(0.1, ge=0, le=1)
    max_pass_rate: float = Field(0.9, ge=0, le=1)
    """Tasks whose share of passes is between the two, both included, are kept: the policy can do them, and not always."""
    near_duplicate_threshold: float = Field(0.8, gt=0, le=1)
    """Tasks whose instructions share so much (Jaccard index of 5-character shingles) are near-duplicates; 1: equal text."""
    max_per_cluster: int = Field(0, ge=0)
    """Of near-duplicates so many are kept, those with pass rates nearest to a half; 0: all."""
    heldout_share: float = Field(0.2, ge=0, lt=1)
    """Share of the kept tasks that is held out; 0: none."""
    split_by: Literal["task", "cluster", "app"] = "cluster"
    """What is never on both sides: a task; near-duplicates either; or an app with all its tasks either."""
    seed: int = 0
    """Of the split."""

    @model_validator(mode="after")
    def _ordered(self) -> PoolConfig:
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(
                f"pool.min_pass_rate = {self.min_pass_rate} is above pool.max_pass_rate = {self.max_pass_rate}: "
                "no task can be between them"
            )
        if self.min_valid_attempts > self.num_attempts:
            raise ValueError(
                f"pool.min_valid_attempts = {self.min_valid_attempts} is above pool.num_attempts = {self.num_attempts}: "
                "no task can have so many"
            )
        return self
