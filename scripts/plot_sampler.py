"""Write an SVG of the frontier sampler's draw probabilities over a simulated run: python scripts/plot_sampler.py OUT.svg"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

from slime_cua.algo.frontier import FrontierSampler

NUM_TASKS, NUM_STEPS, EPISODES = 8, 400, 8
WIDTH_PX, HEIGHT_PX, MARGIN_PX = 760, 320, 44


def simulate() -> list[dict[str, float]]:
    """Weights after each collection of two groups; task i is half solved at skill i, skill rises from -1 to 8."""
    tasks = [f"task {i}" for i in range(NUM_TASKS)]
    sampler, rng = FrontierSampler(tasks, seed=0), random.Random(1)
    history = []
    for step in range(NUM_STEPS):
        skill = -1 + 9 * step / NUM_STEPS
        history.append(sampler.weights())
        outcomes = {}
        for task in sampler.sample(2):
            chance = 1 / (1 + math.exp(-2 * (skill - tasks.index(task))))
            outcomes[task] = [rng.random() < chance for _ in range(EPISODES)]
        sampler.update(outcomes)
    return history


def to_svg(history: list[dict[str, float]]) -> str:
    """One line a task, from blue (easy) to red (hard)."""
    top = max(max(weights.values()) for weights in history) * 1.1
    x_of = [MARGIN_PX + (WIDTH_PX - 2 * MARGIN_PX) * i / (len(history) - 1) for i in range(len(history))]

    def y_of(weight: float) -> float:
        return HEIGHT_PX - MARGIN_PX - (HEIGHT_PX - 2 * MARGIN_PX) * weight / top

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {HEIGHT_PX}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH_PX}" height="{HEIGHT_PX}" fill="white"/>',
    ]
    for share in range(0, int(top * 100) + 1, 5):
        y = y_of(share / 100)
        lines.append(
            f'<path d="M{MARGIN_PX} {y:.1f}H{WIDTH_PX - MARGIN_PX}" stroke="#ddd"/><text x="8" y="{y + 4:.1f}">{share} %</text>'
        )
    for i, task in enumerate(history[0]):
        points = " ".join(
            f"{x:.1f},{y_of(w[task]):.1f}" for x, w in zip(x_of[::2], history[::2], strict=True)
        )
        colour = f"hsl({230 - 230 * i // (NUM_TASKS - 1)},70%,45%)"
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines.append(
            f'<text x="{MARGIN_PX + 84 * i}" y="20" fill="{colour}">{task}{" (easy)" if i == 0 else ""}</text>'
        )
    lines.append(
        f'<text x="{WIDTH_PX // 2 - 60}" y="{HEIGHT_PX - 12}">collections ({NUM_STEPS} of 2 groups)</text></svg>'
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/plot_sampler.py OUT.svg")
    Path(sys.argv[1]).write_text(to_svg(simulate()))
