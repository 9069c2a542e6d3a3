"""How often a base policy answers word for word: reading, telling, carrying words of a request past a screen.

    python -m slime_cua.evaluation.answers models/tiny_base

Chat turns like those of the last stage of pretraining, under seeds that training never uses. An answer counts when each of
its tokens is the likeliest one after the right ones before it, so greedy decoding would give it. Points are left to
`evaluation.pointing`, which accepts any place inside the box.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime_cua.config.base import load
from slime_cua.evaluation.pointing import BLANK_LEVEL, HELDOUT_SEED, wilson
from slime_cua.synthesis.pretrain import PretrainConfig
from slime_cua.synthesis.pretrain_data import Batch, Encoder, Stage, make_batch, shape_of
from slime_cua.synthesis.questions import POINT_KINDS
from slime_cua.synthesis.screens import SCREEN_WH_PX
from slime_cua.synthesis.turns import KIND_NAMES

CHUNK = 8
"""Sequences of one forward pass."""


@dataclass(frozen=True)
class Rate:
    """One line of the table; the interval is Wilson's, 95 %."""

    kind: str
    num: int
    rate: float
    low: float
    high: float
    blank: float
    """The same answers with the images blanked."""


def spans(kind_L: np.ndarray, token_L: np.ndarray, ends: set[int]) -> list[tuple[int, int]]:
    """(first, after the last) of each answer: trained tokens up to an end of line or turn."""
    found: list[tuple[int, int]] = []
    first: int | None = None
    for at, kind in enumerate(kind_L):
        if kind < 0:
            first = None
            continue
        first = at if first is None else first
        if int(token_L[at]) in ends:
            found.append((first, at + 1))
            first = None
    return found


def draw(stage: Stage, encoder: Encoder, num: int, num_screens: int) -> Batch:
    """`num` held-out sequences of chat turns."""
    stage = stage.model_copy(update={"chat_share": 1.0, "uses_of_screen": 1})
    batch = shape_of(stage.lengths, num, num_screens, math.prod(encoder.screen_grid)).allocate()
    make_batch(np.random.default_rng([HELDOUT_SEED, num_screens]), stage, encoder, batch)
    return batch


def likeliest(model: Any, patches: Any, batch: Batch, device: str, is_blank: bool) -> np.ndarray:
    """[B, L]: the likeliest token at each place, given the right tokens before it; place 0 is its own."""
    import torch

    from slime_cua.trainer.images import patchify

    num_screens = len(batch.pixels) // len(batch.token_ids_BL)
    rows, columns = patches.grid_hw(*SCREEN_WH_PX)
    best = batch.token_ids_BL.copy()
    for start in range(0, len(best), CHUNK):
        ids = torch.from_numpy(batch.token_ids_BL[start : start + CHUNK]).long().to(device)
        pixels = batch.pixels[start * num_screens : (start + len(ids)) * num_screens]
        pixels = np.full_like(pixels, BLANK_LEVEL) if is_blank else pixels
        with torch.inference_mode():
            logits = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == model.config.image_token_id).int(),
                pixel_values=patchify(torch.from_numpy(pixels).to(device), patches),
                image_grid_thw=torch.tensor([[1, rows, columns]] * len(pixels), device=device),
            ).logits
        best[start : start + len(ids), 1:] = logits[:, :-1].argmax(-1).cpu().numpy()
    return best


def measure(hf_dir: Path, stage: Stage, num: int, device: str = "cpu") -> list[Rate]:
    """Rates by kind over `num` sequences of one screen and num / 2 of two."""
    import torch
    from transformers import Qwen3_5ForConditionalGeneration

    from slime_cua.trainer.images import PatchConfig

    encoder, patches = Encoder(hf_dir), PatchConfig.from_hf(hf_dir)
    model: Any = Qwen3_5ForConditionalGeneration.from_pretrained(str(hf_dir), dtype=torch.float32)
    model = model.to(device).eval()
    ends = {encoder.encode("\n")[0], encoder.encode("<|im_end|>")[0]}
    right: dict[str, list[tuple[bool, bool]]] = {}
    for num_screens in (1, 2):
        batch = draw(stage, encoder, num // num_screens, num_screens)
        seen, blank = (likeliest(model, patches, batch, device, b) for b in (False, True))
        hits, blank_hits = seen == batch.token_ids_BL, blank == batch.token_ids_BL
        for row, kind_L in enumerate(batch.kind_BL):
            for first, after in spans(kind_L, batch.token_ids_BL[row], ends):
                pair = bool(hits[row, first:after].all()), bool(blank_hits[row, first:after].all())
                right.setdefault(KIND_NAMES[kind_L[first]], []).append(pair)
    rates = []
    for kind in KIND_NAMES:
        pairs = right.get(kind, [])
        if kind in POINT_KINDS or not pairs:
            continue
        count = sum(hit for hit, _ in pairs)
        low, high = wilson(count, len(pairs))
        blank_rate = sum(hit for _, hit in pairs) / len(pairs)
        rates.append(Rate(kind, len(pairs), count / len(pairs), low, high, blank_rate))
    return rates


def table(rates: Sequence[Rate]) -> str:
    """The rates as a Markdown table."""
    lines = ["| answer | n | word for word | 95 % interval | image blanked |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.kind} | {r.num} | {r.rate:.3f} | {r.low:.3f} to {r.high:.3f} | {r.blank:.3f} |" for r in rates
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Share of held-out answers that come word for word.")
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--config", default="recipes/pretrain_tiny_base.yaml", help="recipe of pretraining")
    parser.add_argument("--num", type=int, default=256, help="sequences of one screen; half as many of two")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the rates to this file")
    given = parser.parse_args(arguments)
    stage = load(PretrainConfig, given.config).stages[-1]
    rates = measure(given.model, stage, given.num, given.device)
    print(table(rates))
    if given.json:
        given.json.write_text(json.dumps([asdict(rate) for rate in rates], indent=1) + "\n")


if __name__ == "__main__":
    main()
