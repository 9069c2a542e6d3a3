"""The embedded engine's ragged, cached steps give what a plain transformers forward gives."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from rollout.embedded.images import PreparedImage
from rollout.embedded.model import EngineModel, StepPart
from rollout.embedded.prompt import Prompt, build_prompt
from rollout.embedded.ragged import KvBuffer
from rollout.embedded.random_model import RandomModelSpec, write_random_model
from slime_cua.core.types import ImageRef
from slime_cua.data.expand import ImageProcessorConfig, expand_image_placeholders

SPEC = RandomModelSpec(
    hidden=64, layers=3, heads=4, kv_heads=2, head_dim=32, vision_hidden=32, vision_depth=2
)
IMAGE = 5
TOLERANCE = 1e-4


def picture(seed: int, width: int, height: int) -> str:
    """Base64 of a PNG of noise."""
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def text(seed: int, count: int) -> list[int]:
    """Token ids that are neither special nor an image."""
    return np.random.default_rng(seed).integers(20, 270, count).tolist()


@pytest.fixture(scope="module", params=["attention", "gated delta net"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    mixed = ("linear_attention", "linear_attention", "full_attention")
    spec = SPEC if request.param == "attention" else replace(SPEC, layer_types=mixed)
    return write_random_model(tmp_path_factory.mktemp("model"), spec)


@pytest.fixture(scope="module")
def engine(folder: Path) -> EngineModel:
    return EngineModel(folder, "fp32", "cpu")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def prepare(engine: EngineModel, ids: list[int], encoded: list[str]) -> tuple[Prompt, list[PreparedImage]]:
    images = engine.images.prepare(encoded)
    grids, hashes = [image.grid for image in images], [image.sha256 for image in images]
    return build_prompt(ids, grids, hashes, engine.image_token_id, engine.images.merge_size), images


def part(
    engine: EngineModel, kv: KvBuffer, prompt: Prompt, images: list[PreparedImage], end: int
) -> StepPart:
    """Prompt tokens from what `kv` holds up to `end`."""
    start = kv.length
    spans = [s for s in prompt.spans if s.start < end and s.start + s.length > start]
    placed = [
        (max(s.start - start, 0), max(start - s.start, 0), engine.features(images[s.index])) for s in spans
    ]
    return StepPart(kv, prompt.ids_N[start:end], prompt.positions_3N[:, start:end], placed)


@torch.no_grad()
def plain_logits(engine: EngineModel, reference: Any, ids: np.ndarray, images: list[PreparedImage]) -> Any:
    """Logits (N, V) of one unbatched, uncached transformers forward over expanded ids."""
    row = torch.from_numpy(ids)[None]
    inputs: dict[str, Any] = {"input_ids": row}
    if images:
        inputs["pixel_values"] = torch.cat([engine.images.pixels(image) for image in images])
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in images])
        inputs["mm_token_type_ids"] = (row == IMAGE).int()
    return reference(**inputs).logits[0]


def test_positions_are_those_of_transformers(engine: EngineModel, reference: Any) -> None:
    prompt, images = prepare(
        engine,
        [*text(0, 7), IMAGE, 8, IMAGE, *text(1, 5), IMAGE, 9],
        [picture(0, 96, 64), picture(1, 64, 160), picture(0, 96, 64)],
    )
    row = torch.from_numpy(prompt.ids_N)[None]
    expected, delta = reference.model.get_rope_index(
        row,
        mm_token_type_ids=(row == IMAGE).int(),
        image_grid_thw=torch.tensor([image.grid for image in images]),
    )
    assert (expected[:, 0].numpy() == prompt.positions_3N).all()
    assert prompt.next_position == len(prompt.ids_N) + delta.item()


def test_expansion_is_as_long_as_the_trainers(engine: EngineModel, folder: Path) -> None:
    sizes = [(640, 384), (100, 70), (33, 31)]
    ids = [*text(0, 3), IMAGE, 7, IMAGE, 8, IMAGE, 9]
    prompt, _ = prepare(engine, ids, [picture(i, *size) for i, size in enumerate(sizes)])
    refs = [ImageRef(sha256=str(i), width_px=w, height_px=h) for i, (w, h) in enumerate(sizes)]
    config = ImageProcessorConfig.from_hf(folder)
    assert prompt.ids_N.tolist() == expand_image_placeholders(ids, refs, config)


def test_ragged_chunked_steps_equal_a_plain_forward(engine: EngineModel, reference: Any) -> None:
    first = prepare(engine, [*text(0, 9), IMAGE, *text(1, 6)], [picture(0, 128, 96)])
    second = prepare(engine, text(2, 21), [])
    third = prepare(engine, [4, IMAGE, *text(3, 11), IMAGE, 8, 8], [picture(1, 64, 64), picture(0, 128, 96)])
    buffers = [KvBuffer(engine.kv_shape, 0) for _ in range(3)]
    cuts = [[5, 13, 17, 27], [21], [3, 9, 27]]
    cuts[0][-1], cuts[2][-1] = len(first[0].ids_N), len(third[0].ids_N)
    for round_ in range(4):
        parts, expected = [], []
        for (prompt, images), kv, ends in zip((first, second, third), buffers, cuts, strict=True):
            if round_ < len(ends):
                parts.append(part(engine, kv, prompt, images, ends[round_]))
                seen = [images[s.index] for s in prompt.spans if s.start < len(prompt.ids_N)]
                expected.append(plain_logits(engine, reference, prompt.ids_N, seen)[ends[round_] - 1])
        torch.testing.assert_close(engine.step(parts), torch.stack(expected), atol=TOLERANCE, rtol=0)


def test_batched_decoding_after_images_equals_a_plain_forward(engine: EngineModel, reference: Any) -> None:
    requests = [
        prepare(engine, [*text(9, 4), IMAGE, *text(8, 5)], [picture(3, 160, 96)]),
        prepare(engine, text(7, 30), []),
    ]
    buffers = [KvBuffer(engine.kv_shape, 0) for _ in requests]
    for (prompt, images), kv in zip(requests, buffers, strict=True):
        engine.step([part(engine, kv, prompt, images, len(prompt.ids_N))])
    outputs: list[list[int]] = [[], []]
    for step in range(5):
        parts = []
        for (prompt, _), kv, output in zip(requests, buffers, outputs, strict=True):
            output.append(50 + 3 * step)
            place = np.full((3, 1), prompt.next_position + step)
            parts.append(StepPart(kv, np.array([output[-1]]), place))
        logits = engine.step(parts)
        for row, (prompt, images), output in zip(logits, requests, outputs, strict=True):
            ids = np.concatenate([prompt.ids_N, output])
            expected = plain_logits(engine, reference, ids, images)[-1]
            torch.testing.assert_close(row, expected, atol=TOLERANCE, rtol=0)


def test_a_copied_prefix_continues_like_its_source(engine: EngineModel) -> None:
    if engine.kv_shape.is_recurrent:
        pytest.skip("running states cannot be cut")
    prompt, images = prepare(engine, [*text(5, 12), IMAGE, *text(6, 8)], [picture(4, 96, 96)])
    whole = KvBuffer(engine.kv_shape, 0)
    expected = engine.step([part(engine, whole, prompt, images, len(prompt.ids_N))])
    copied = KvBuffer(engine.kv_shape, 0)
    copied.copy_prefix(whole, 16)
    got = engine.step([part(engine, copied, prompt, images, len(prompt.ids_N))])
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_features_are_computed_once_and_again_after_the_vision_weights_change(engine: EngineModel) -> None:
    _, (image,) = prepare(engine, [IMAGE], [picture(11, 64, 64)])
    before = engine.features(image)
    assert engine.features(image) is before
    engine.vision_generation += 1
    after = engine.features(image)
    assert after is not before
    torch.testing.assert_close(after, before, atol=1e-6, rtol=0)


def test_placeholders_and_images_must_be_as_many() -> None:
    with pytest.raises(ValueError, match=r"2 image placeholders .* 1 images"):
        build_prompt([1, IMAGE, IMAGE], [(1, 4, 4)], ["ab" * 32], IMAGE, 2)


def test_an_unreadable_image_is_refused_by_its_index(engine: EngineModel) -> None:
    with pytest.raises(ValueError, match=r"image_data\[1\]"):
        engine.images.prepare([picture(0, 64, 64), base64.b64encode(b"not an image").decode()])
