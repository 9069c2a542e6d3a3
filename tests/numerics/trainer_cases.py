"""Samples for the trainer tests: text only, one image, several images with one repeated."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from slime_cua.core.types import ImageRef, Segment, TrainSample
from tests.numerics.tiny_models import IMAGE_TOKEN, VISION_END, VISION_START


class MemoryStore:
    """Image bytes by content."""

    def __init__(self) -> None:
        self._png: dict[str, bytes] = {}

    def put(self, pixels: np.ndarray) -> ImageRef:
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        png = buffer.getvalue()
        sha256 = hashlib.sha256(png).hexdigest()
        self._png[sha256] = png
        return ImageRef(sha256=sha256, width_px=pixels.shape[1], height_px=pixels.shape[0])

    def get(self, ref: ImageRef) -> bytes:
        return self._png[ref.sha256]


def samples_for(folder: Path) -> tuple[list[TrainSample], MemoryStore]:
    """With ten images, or those without any for a text model."""
    samples, store = make_samples(with_ten_images=True)
    if "vision_config" in json.loads((folder / "config.json").read_text()):
        return samples, store
    return [sample for sample in samples if not sample.segment.images], store


def make_samples(with_ten_images: bool = False) -> tuple[list[TrainSample], MemoryStore]:
    """Five ragged samples; images of two sizes, one of them shown twice. With ten images: a sixth sample that shows ten."""
    rng = np.random.default_rng(7)
    store = MemoryStore()
    shots = [
        store.put(rng.integers(0, 255, (h, w, 3), dtype=np.uint8)) for h, w in ((64, 96), (96, 64), (64, 96))
    ]
    shown = [[], [shots[0]], [shots[1], shots[0], shots[2]], [], [shots[2], shots[2]]]
    if with_ten_images:
        shown.append([shots[i % 3] for i in range(10)])
    return [_sample(f"s{i}", images, rng) for i, images in enumerate(shown)], store


def _sample(name: str, images: list[ImageRef], rng: np.random.Generator) -> TrainSample:
    ids: list[int] = []
    steps: list[int] = []
    num_steps = max(len(images), 2)
    for step in range(num_steps):
        context = rng.integers(20, 300, int(rng.integers(2, 6))).tolist()
        if step < len(images):
            context += [VISION_START, IMAGE_TOKEN, VISION_END]
        response = rng.integers(20, 300, int(rng.integers(3, 9))).tolist()
        ids += context + response
        steps += [-1] * len(context) + [step] * len(response)
    trained = [step >= 0 for step in steps]
    segment = Segment(
        segment_id=name,
        episode_id=f"e-{name}",
        group_id="g",
        task_id="t",
        token_ids=tuple(ids),
        is_trained=tuple(trained),
        logp=tuple(-5.9 + 0.05 * float(rng.normal()) if t else 0.0 for t in trained),
        versions=tuple(0 if t else -1 for t in trained),
        step_of_token=tuple(steps),
        step_types=tuple(("gui", "code")[i % 2] for i in range(num_steps)),
        images=tuple(images),
    )
    return TrainSample(segment=segment, advantage=float(rng.normal()), reward=0.5)
