"""Measure the embedded engine's model steps on one core: `python scripts/bench_engine.py [--model DIR]`.

Prints CPU time (not wall time, so that a busy machine does not blur it) of one screenshot's preprocessing, of the vision
tower, of a screenshot turn's prefill, and of decoding at several batch sizes and context lengths.
"""

from __future__ import annotations

import argparse
import base64
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rollout.embedded.model import EngineModel, StepPart
from rollout.embedded.prompt import build_prompt
from rollout.embedded.ragged import KvBuffer
from rollout.embedded.random_model import write_random_model

TURN_TEXT_TOKENS = 24


def screenshot_png(seed: int, width: int, height: int) -> bytes:
    """A PNG with large plain areas, as desktops have."""
    small = np.random.default_rng(seed).integers(0, 255, (12, 20, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST).save(file, "png")
    return file.getvalue()


def screenshot(seed: int, width: int, height: int) -> str:
    """Base64 of `screenshot_png`."""
    return base64.b64encode(screenshot_png(seed, width, height)).decode()


def cpu_ms(work: Callable[[], object], repeats: int) -> float:
    """CPU milliseconds of one call."""
    work()
    began = time.process_time()
    for _ in range(repeats):
        work()
    return 1000 * (time.process_time() - began) / repeats


def decode_ms(model: EngineModel, batch: int, context: int) -> float:
    """CPU milliseconds of one decode step."""
    buffers = []
    for _ in range(batch):
        kv = KvBuffer(model.kv_shape, context + 64)
        kv.keys.normal_()
        kv.values.normal_()
        kv.length = context
        buffers.append(kv)
    token = np.array([40])
    return cpu_ms(lambda: model.step([StepPart(kv, token, np.full((3, 1), kv.length)) for kv in buffers]), 30)


def turn_ms(model: EngineModel, turns: int, size: tuple[int, int]) -> tuple[float, float]:
    """CPU milliseconds of the vision tower and of the prefill of one turn, averaged over `turns` of one session."""
    kv, vision, prefill = KvBuffer(model.kv_shape, 0), 0.0, 0.0
    text = [40] * TURN_TEXT_TOKENS
    for turn in range(turns):
        (image,) = model.images.prepare([screenshot(turn, *size)])
        prompt = build_prompt(
            [*text, model.image_token_id, 41],
            [image.grid],
            [image.sha256],
            model.image_token_id,
            model.images.merge_size,
        )
        began = time.process_time()
        features = model.features(image)
        seen = time.process_time()
        placed = [(prompt.spans[0].start, 0, features)]
        model.step([StepPart(kv, prompt.ids_N, prompt.positions_3N + kv.length, placed)])
        vision, prefill = vision + seen - began, prefill + time.process_time() - seen
    return 1000 * vision / turns, 1000 * prefill / turns


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, help="checkpoint folder; default: random weights of quickstart size"
    )
    parser.add_argument("--size", default="640x384", help="screenshot, width x height")
    options = parser.parse_args()
    width, height = (int(side) for side in options.size.split("x"))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = EngineModel(options.model or write_random_model(Path(folder) / "model"), "fp32", "cpu")
    encoded = [screenshot(1000 + i, width, height) for i in range(20)]
    prepared = iter(encoded)
    print(
        f"preprocess one {width}x{height} screenshot: {cpu_ms(lambda: model.images.prepare([next(prepared)]), 19):.1f} ms"
    )
    vision, prefill = turn_ms(model, 6, (width, height))
    print(
        f"vision tower: {vision:.1f} ms; prefill of a screenshot turn (mean over 6 turns): {prefill:.1f} ms"
    )
    for batch in (1, 16):
        for context in (300, 1200, 2700):
            step = decode_ms(model, batch, context)
            print(
                f"decode, batch {batch}, context {context}: {step:.1f} ms, {1000 * batch / step:.0f} tokens/s"
            )


if __name__ == "__main__":
    main()
