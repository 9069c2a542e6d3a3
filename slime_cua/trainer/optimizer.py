"""Megatron's (distributed) Adam around a PolicyModel, its learning-rate schedule, and one guarded step."""

from __future__ import annotations

import math
from typing import Any

import torch

import megatron_patches
from slime_cua.config.trainer import OptimizerConfig, TrainerConfig
from slime_cua.trainer.model import DTYPES, PolicyModel

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """Rate of optimiser step `step` (0-based): linear warm-up, then constant, or cosine to min_lr over decay_steps.

    warm-up:  lr (step + 1) / warmup_steps
    cosine:   min_lr + (lr - min_lr) (1 + cos(pi x)) / 2,   x = (step - warmup_steps) / decay_steps in [0, 1]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay_steps == 0:
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / config.decay_steps)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


class Optimizer:
    """Gradient buffers and optimiser of a model; replaces model.runner by the data-parallel wrapper."""

    def __init__(self, model: PolicyModel, config: TrainerConfig) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer

        section = config.optimizer
        self._model, self._section = model, section
        self._is_offloaded = config.offload_optimizer
        self.is_distributed = config.use_distributed_optimizer
        self.num_steps = 0
        """Optimiser steps taken; decides the learning rate."""
        self.ddp: Any = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=config.use_distributed_optimizer, grad_reduce_in_fp32=True
            ),
            model.module,
        )
        model.runner = self.ddp
        self.megatron: Any = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=section.lr,
                weight_decay=section.weight_decay,
                adam_beta1=section.betas[0],
                adam_beta2=section.betas[1],
                adam_eps=section.eps,
                clip_grad=section.clip_grad,
                use_distributed_optimizer=config.use_distributed_optimizer,
                bf16=config.dtype == "bf16",
                params_dtype=DTYPES[config.dtype],
            ),
            [self.ddp],
            use_gloo_process_groups=True,
        )

    def zero_grad(self) -> None:
        """Forget gradients."""
        self.ddp.zero_grad_buffer()
        self.megatron.zero_grad()

    def move_moments(self, device: torch.device | None) -> None:
        """Adam's moments to `device`; None: to where their parameters are. Offloaded ones go to pinned memory where CUDA is."""
        for part in getattr(self.megatron, "chained_optimizers", [self.megatron]):
            for parameter, state in part.optimizer.state.items():
                for name in MOMENTS:
                    moment = state.get(name)
                    if moment is None:
                        continue
                    there = parameter.device if device is None else device
                    moved = moment.to(there, non_blocking=device is None)
                    is_pinnable = there.type == "cpu" and moment.is_cuda
                    state[name] = moved.pin_memory() if is_pinnable else moved

    def allocate_state(self) -> None:
        """Give torch's AdamW the moments it would make at its first step (zero, step 0): saving and loading need them."""
        for part in getattr(self.megatron, "chained_optimizers", [self.megatron]):
            inner = part.optimizer
            if not isinstance(inner, torch.optim.AdamW):
                continue
            for parameter in (p for group in inner.param_groups for p in group["params"]):
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }

    def start_anew(self) -> None:
        """As after the constructor, around the weights that the model has now: no moments, no steps taken."""
        for part in getattr(self.megatron, "chained_optimizers", [self.megatron]):
            part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                group.pop("step", None)
        self.megatron.reload_model_params()
        self.num_steps = 0

    def reduce_gradients(self) -> None:
        """Sum gradients over data-parallel ranks and complete partial ones over tensor-parallel ranks. A collective."""
        from megatron.core.distributed import finalize_model_grads

        megatron_patches.before_finalize(self._model.module, self._model.config)
        finalize_model_grads([self.ddp], None)

    def step(self, rate: float | None = None) -> dict[str, float]:
        """One update with the reduced gradients; none when their norm is not finite.

        rate: learning rate; None: what the schedule says for this step. Gives grad_norm (before clipping), lr, and skipped
        (0 or 1).
        """
        rate = learning_rate(self.num_steps, self._section) if rate is None else rate
        for group in self.megatron.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._section.weight_decay * group.get("wd_mult", 1.0)
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            return {"grad_norm": norm, "lr": rate, "skipped": 1.0}
        if self._is_offloaded:
            self.move_moments(None)
        self.megatron.step()
        if self._is_offloaded:
            self.move_moments(torch.device("cpu"))
        self.num_steps += 1
        return {"grad_norm": norm, "lr": rate, "skipped": 0.0}
