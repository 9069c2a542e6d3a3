"""Megatron trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_cua.config.base import ConfigModel


class ParallelConfig(ConfigModel):
    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    dp: int = Field(1, ge=1)
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


class OptimizerConfig(ConfigModel):
    lr: float = Field(1e-6, gt=0)
    min_lr: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    decay_steps: int = Field(0, ge=0)
    """0: constant after warm-up; else cosine to min_lr over this many steps."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = Field(0.1, ge=0)
    clip_grad: float = Field(1.0, gt=0)


class LoraConfig(ConfigModel):
    """Low-rank adapters instead of all weights."""

    rank: int = Field(0, ge=0)
    """0: train all weights."""
    alpha: int = Field(32, ge=1)
    """The adapter's output is times alpha / rank."""
    targets: tuple[Literal["attention", "feed_forward"], ...] = ("attention", "feed_forward")
    """Gated delta net counts as attention, experts as feed_forward. The vision tower gets none."""


class MoeConfig(ConfigModel):
    """For models with experts."""

    balance: Literal["none", "aux_loss"] = "none"
    """aux_loss: Switch Transformer's load-balancing loss, mean over the step's tokens. Router biases are not offered: Qwen's
    checkpoints have none, so neither an export nor an engine could hold them."""
    aux_loss_coef: float = Field(1e-3, ge=0)
    replay_routing: bool = True
    """Tokens whose experts the engine recorded (rollout.engine.records_routing) go through the same experts in training."""


class TrainerConfig(ConfigModel):
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    dtype: Literal["fp32", "bf16"] = "bf16"
    steps_per_collection: int = Field(1, ge=1)
    """Optimiser steps over one collection of groups, each over its own share of the samples; the version counts once."""
    max_tokens_per_rank: int = Field(32768, ge=16)
    """Token budget (images expanded) of one packed micro-batch."""
    freeze_vision: bool = True
    vision_cache_mb: int = Field(256, ge=0)
    """Features of images that a frozen vision tower keeps on each rank from step to step; 0: none."""
    moe: MoeConfig = MoeConfig()
    lora: LoraConfig = LoraConfig()
    reference_model: str = ""
    """Hugging Face folder of the frozen reference policy, of the same shape. Empty: the model that training started from; with
    adapters it must be, and the reference is the model with them off."""
    recompute: Literal["none", "selective", "full"] = "none"
    use_distributed_optimizer: bool = True
    offload_optimizer: bool = False
    """Adam's two moments (8 of 12 bytes a parameter) wait in the host's memory between steps: room for activations, at the
    cost of two copies a step."""
    async_save: bool = True
    """Checkpoints are copied to the host and written while training goes on; the run state names one when it is whole. The copy
    takes the host as much memory as the checkpoint takes on disk. false: training waits."""
    timeout_s: float = Field(600.0, gt=0)
    """A trainer call in which no rank makes progress (a micro-batch, a tensor written) for so long is given up: a
    collective hangs. Also the deadline of the collectives themselves."""
    restart_timeout_s: float = Field(900.0, gt=0)
    """Deadline for a trainer group to start and load the model, at first and after a rank was lost."""
    num_threads: int = 1
    """CPU threads a rank."""
