"""Random weights from which a tiny policy learns to point within minutes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from slime_cua.config.base import ConfigModel
from slime_cua.convert import copy_companions
from slime_cua.core.coordinates import GRID
from slime_cua.synthesis.pretrain_data import Encoder


class InitConfig(ConfigModel):
    """How weights are drawn. What matters: a patch's place is as loud as its content, and near numbers look alike."""

    weight_std: float = Field(0.02, gt=0)
    """Of every matrix and embedding."""
    position_std: float = Field(1.0, gt=0)
    """Of the vision tower's position embedding."""
    number_std: float = Field(0.05, ge=0)
    """Of the embedding and head rows of the tokens 0 to 1000, which are waves of their number, so that what is learned for
    one coordinate helps its neighbours; 0: like other tokens. Without it pointing takes many times as long."""
    number_cycles: tuple[float, float] = (0.25, 4.0)
    position_cycles: tuple[float, float] = (0.25, 6.0)
    """The position embedding is made of waves along one axis each, with from this to this many cycles a screen, so that a
    linear map reads rows and columns off it, and near places look alike."""


def _waves(
    place_P: torch.Tensor, pairs: int, cycles: tuple[float, float], generator: torch.Generator
) -> torch.Tensor:
    """[P, 2 pairs] of mean square 1: sqrt(2) cos(2 pi (f z + phase)); f runs geometrically through `cycles`, phases are drawn,
    in pairs a quarter of a turn apart. Source: Fourier features (Tancik et al. 2020), on one axis."""
    low, high = cycles
    turns = low * (high / low) ** torch.linspace(0, 1, pairs)
    phase = torch.rand(pairs, generator=generator).repeat_interleave(2) + torch.tensor([0.0, 0.25]).repeat(
        pairs
    )
    return math.sqrt(2) * torch.cos(2 * math.pi * (place_P[:, None] * turns.repeat_interleave(2) + phase))


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
        numbers = Encoder(source).encode
        ids = [numbers(str(n)) for n in range(GRID + 1)]
        if config.number_std and all(len(one) == 1 for one in ids):
            for weight in (model.get_input_embeddings().weight, model.lm_head.weight):
                draw_numbers(weight, [one[0] for one in ids], config, generator)
    model.save_pretrained(str(target))
    copy_companions(source, target)


def draw_positions(table_PH: torch.Tensor, config: InitConfig, generator: torch.Generator) -> None:
    """Fill a square position table [P, H] in place; the first half of the channels depends on the row only, the second on
    the column only.

    Two-dimensional waves would not do: few of their channels change with the column alone.
    """
    side, width = math.isqrt(table_PH.shape[0]), table_PH.shape[1]
    place = torch.linspace(0, 1, side)
    rows, columns = (_waves(place, width // 4, config.position_cycles, generator) for _ in range(2))
    table = torch.cat([rows[:, None].expand(side, side, -1), columns[None].expand(side, side, -1)], dim=2)
    table_PH.zero_()
    table_PH[:, : table.shape[2]] = config.position_std * table.reshape(side * side, -1)


def draw_numbers(
    weight_VH: torch.Tensor, ids: list[int], config: InitConfig, generator: torch.Generator
) -> None:
    """Fill the rows of the number tokens in place: ids[n] is the token of the number n; row = waves of n / (len(ids) - 1)."""
    place = torch.linspace(0, 1, len(ids))
    table = _waves(place, weight_VH.shape[1] // 2, config.number_cycles, generator)
    weight_VH[torch.tensor(ids), : table.shape[1]] = config.number_std * table
