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
    position_cycles: tuple[float, float] = (0.25, 6.0)
    """The position embedding is made of waves along one axis each, with from this to this many cycles a screen, so that a
    linear map reads rows and columns off it, and near places look alike."""


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
    """Fill a square position table [P, H] in place; the first half of the channels depends on the row only, the second on
    the column only.

        value(z) = std sqrt(2) cos(2 pi (f z + phase)),  z in [0, 1] along the axis

    f runs geometrically through position_cycles; phases are drawn, in pairs a quarter of a turn apart. Two-dimensional
    waves would not do: few of their channels change with the column alone.
    Source: Fourier features (Tancik et al. 2020), one axis at a time.
    """
    side, width = math.isqrt(table_PH.shape[0]), table_PH.shape[1]
    low, high = config.position_cycles
    pairs = width // 4
    cycles = low * (high / low) ** torch.linspace(0, 1, pairs).repeat_interleave(2)
    place = torch.linspace(0, 1, side)
    halves = []
    for _ in range(2):
        phase = torch.rand(pairs, generator=generator).repeat_interleave(2) + torch.tensor(
            [0.0, 0.25]
        ).repeat(pairs)
        halves.append(math.sqrt(2) * torch.cos(2 * math.pi * (place[:, None] * cycles + phase)))
    rows, columns = halves
    table = torch.cat([rows[:, None].expand(side, side, -1), columns[None].expand(side, side, -1)], dim=2)
    table_PH.zero_()
    table_PH[:, : table.shape[2]] = config.position_std * table.reshape(side * side, -1)
