"""Random weights from which a tiny policy learns to point within minutes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from slime_cua.config.base import ConfigModel
from slime_cua.convert import copy_companions


class InitConfig(ConfigModel):
    """How weights are drawn. What matters is that a patch's place is as loud as its content from the first step."""

    weight_std: float = Field(0.02, gt=0)
    """Of every matrix and embedding."""
    position_std: float = Field(1.0, gt=0)
    """Of the vision tower's position embedding."""
    position_cycles: float = Field(3.0, ge=0)
    """The position embedding is a sum of plane waves with this many cycles a screen (standard deviation), so that near places
    look alike; 0: independent normal values."""


def write_initial_folder(source: Path, target: Path, config: InitConfig, seed: int) -> None:
    """Write `target`: config, tokenizer and processor files of `source` with fresh fp32 weights. The same seed, the same file."""
    from transformers import AutoConfig, Qwen3_5ForConditionalGeneration

    target.mkdir(parents=True, exist_ok=True)
    hf_config = AutoConfig.from_pretrained(str(source))
    model: Any = Qwen3_5ForConditionalGeneration(hf_config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.normal_(0.0, config.weight_std, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
        draw_positions(model.model.visual.pos_embed.weight, config, generator)
    model.save_pretrained(str(target))
    copy_companions(source, target)


def draw_positions(table_PH: torch.Tensor, config: InitConfig, generator: torch.Generator) -> None:
    """Fill a square position table [P, H] in place.

        value(x, y) = std sqrt(2) cos(2 pi (f_x x + f_y y) + phase),  f ~ N(0, cycles^2), x and y in [0, 1], per channel

    Source: random Fourier features (Rahimi and Recht 2007; Tancik et al. 2020).
    """
    if config.position_cycles == 0:
        table_PH.normal_(0.0, config.position_std, generator=generator)
        return
    side, width = math.isqrt(table_PH.shape[0]), table_PH.shape[1]
    place = torch.linspace(0, 1, side)
    cycles_2H = torch.randn(2, width, generator=generator) * config.position_cycles
    phase_H = torch.rand(width, generator=generator)
    turns = place[:, None, None] * cycles_2H[0] + place[None, :, None] * cycles_2H[1] + phase_H
    table_PH.copy_(config.position_std * math.sqrt(2) * torch.cos(2 * math.pi * turns).reshape(-1, width))
