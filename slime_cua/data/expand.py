"""From rollout ids (one placeholder an image) to the ids a model computes with (one placeholder an image token).

The one place that knows how many tokens a screenshot is: the renderer predicts the engine's prompt_tokens with it, the
trainer expands its streams with it (I1). Plain Python: no torch, no image is opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_cua.core.errors import ConfigError, DataError
from slime_cua.core.types import ImageRef

MAX_ASPECT_RATIO = 200
"""Qwen's processors refuse longer strips."""


@dataclass(frozen=True)
class ImageProcessorConfig:
    """What decides the number of tokens of an image, e.g. patch 16, merge 2: one token is 32x32 pixels."""

    image_token_id: int
    patch_size_px: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def from_hf(cls, hf_dir: Path | str) -> ImageProcessorConfig:
        """Read config.json and preprocessor_config.json of a Hugging Face folder.

        Raises ConfigError when a file or a field is missing.
        """
        model = _read(Path(hf_dir) / "config.json")
        processor = _read(Path(hf_dir) / "preprocessor_config.json")
        size = processor.get("size") or {}
        fields: dict[str, Any] = {
            "image_token_id": model.get("image_token_id"),
            "patch_size_px": processor.get("patch_size"),
            "merge_size": processor.get("merge_size"),
            "min_pixels": processor.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels"),
            "max_pixels": processor.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels"),
        }
        for name, value in fields.items():
            if not isinstance(value, int):
                raise ConfigError(
                    f"{hf_dir}: {name} = {value!r}: the processor files must give a whole number"
                )
        return cls(**fields)


def resized_wh_px(width_px: int, height_px: int, config: ImageProcessorConfig) -> tuple[int, int]:
    """Size (width, height) at which the model sees an image: both sides multiples of patch * merge, area in bounds.

    Halves round to even, as Python does. Raises DataError for an empty image or one longer than 200 to 1.
    Source: smart_resize of transformers' Qwen2-VL image processor (the rule, restated).
    """
    if min(width_px, height_px) < 1 or max(width_px, height_px) > MAX_ASPECT_RATIO * min(width_px, height_px):
        raise DataError(f"an image of {width_px}x{height_px} px cannot be resized for the model")
    unit = config.patch_size_px * config.merge_size
    width, height = round(width_px / unit) * unit, round(height_px / unit) * unit
    if width * height > config.max_pixels:
        shrink = math.sqrt(width_px * height_px / config.max_pixels)
        width = max(unit, math.floor(width_px / shrink / unit) * unit)
        height = max(unit, math.floor(height_px / shrink / unit) * unit)
    elif width * height < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (width_px * height_px))
        width = math.ceil(width_px * grow / unit) * unit
        height = math.ceil(height_px * grow / unit) * unit
    return width, height


def num_image_tokens(image: ImageRef, config: ImageProcessorConfig) -> int:
    """Tokens that one image becomes, e.g. 240 for 640x384 at patch 16, merge 2."""
    width, height = resized_wh_px(image.width_px, image.height_px, config)
    unit = config.patch_size_px * config.merge_size
    return (width // unit) * (height // unit)


def expand_image_placeholders(
    token_ids: Sequence[int], images: Sequence[ImageRef], config: ImageProcessorConfig
) -> list[int]:
    """`token_ids` with the i-th placeholder repeated once for each token of `images[i]`.

    Raises DataError when placeholders and images differ in number.
    """
    num_placeholders = sum(token == config.image_token_id for token in token_ids)
    if num_placeholders != len(images):
        raise DataError(f"{num_placeholders} image placeholders for {len(images)} images")
    counts = iter([num_image_tokens(image, config) for image in images])
    expanded: list[int] = []
    for token in token_ids:
        expanded.extend([token] * next(counts) if token == config.image_token_id else [token])
    return expanded


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content
