"""Are two loss curves of scripts/bench_train.py the same up to bf16 noise?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

NOISE = 0.02
"""Largest difference at a step, as a share of the loss."""
SAME = ("model", "layers", "max_tokens", "train_vision")
"""Of what both must be curves; layouts, recompute and kernels may differ."""


def compare(first: Path, second: Path) -> int:
    """Print how far two curves are apart; 0 when they agree within NOISE at every step, else 1.

    SystemExit with a sentence for files that are no curves, or are not of the same model, batch and number of steps.
    """
    curves = [_read(path) for path in (first, second)]
    for name in SAME:
        values = [curve.get(name) for curve in curves]
        if values[0] != values[1]:
            raise SystemExit(
                f"{first} has {name} = {values[0]}, {second} has {values[1]}: not the same training"
            )
    pairs = list(zip(*(curve["losses"] for curve in curves), strict=False))
    if len({len(curve["losses"]) for curve in curves}) > 1:
        counts = " and ".join(str(len(curve["losses"])) for curve in curves)
        raise SystemExit(f"{first} and {second} have {counts} steps: run both with the same --curve")
    apart = [abs(a - b) / max(abs(a), 1e-6) for a, b in pairs]
    bad = [number for number, value in enumerate(apart, start=1) if not value < NOISE]
    what = f"{_layout(curves[0])} and {_layout(curves[1])}, {len(pairs)} steps"
    if any(math.isnan(value) for value in apart):
        print(f"{what}: not a number at step {bad[0]}")
        return 1
    print(
        f"{what}: largest difference {100 * max(apart):.2f} % of the loss"
        + (f", at {NOISE:.0%} or more from step {bad[0]}" if bad else "")
    )
    return 1 if bad else 0


def _layout(curve: dict[str, Any]) -> str:
    return f"TP={curve['tp']}"


def _read(path: Path) -> dict[str, Any]:
    try:
        curve = json.loads(path.read_text())
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        curve = None
    if not isinstance(curve, dict) or not curve.get("losses") or "tp" not in curve:
        raise SystemExit(f"{path} is no curve: make one with --curve 50 --out {path}")
    return curve
