"""Placeholders: how many tokens an image is."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from slime_cua.core.errors import ConfigError, DataError
from slime_cua.core.types import ImageRef
from slime_cua.data.expand import (
    ImageProcessorConfig,
    expand_image_placeholders,
    num_image_tokens,
    resized_wh_px,
)

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny_base"
QWEN3 = ImageProcessorConfig(
    image_token_id=9, patch_size_px=16, merge_size=2, min_pixels=65536, max_pixels=16777216
)
QWEN25 = ImageProcessorConfig(
    image_token_id=9, patch_size_px=14, merge_size=2, min_pixels=3136, max_pixels=1003520
)


def image(width_px: int, height_px: int) -> ImageRef:
    return ImageRef(sha256="00", width_px=width_px, height_px=height_px)


@pytest.mark.parametrize(
    ("size", "config", "tokens"),
    [((1504, 832), QWEN3, 47 * 26), ((1920, 1080), QWEN3, 60 * 34), ((1920, 1080), QWEN25, 47 * 26)],
)
def test_screenshots_have_the_known_number_of_tokens(
    size: tuple[int, int], config: ImageProcessorConfig, tokens: int
) -> None:
    assert num_image_tokens(image(*size), config) == tokens


def test_the_tiny_policy_sees_its_desktop_at_full_size() -> None:
    config = ImageProcessorConfig.from_hf(TINY)
    assert resized_wh_px(640, 384, config) == (640, 384)
    assert num_image_tokens(image(640, 384), config) == 10 * 6


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([QWEN3, QWEN25]))
@settings(max_examples=300, deadline=None)
def test_resizing_agrees_with_the_processor_of_transformers(
    width: int, height: int, config: ImageProcessorConfig
) -> None:
    try:
        expected = smart_resize(
            height, width, config.patch_size_px * config.merge_size, config.min_pixels, config.max_pixels
        )
    except ValueError:
        with pytest.raises(DataError):
            resized_wh_px(width, height, config)
        return
    assert resized_wh_px(width, height, config) == (expected[1], expected[0])


def test_each_placeholder_is_repeated_for_its_own_image() -> None:
    wide, small = image(512, 256), image(256, 256)
    assert expand_image_placeholders([1, 9, 2, 9, 3], [wide, small], QWEN3) == [
        1,
        *[9] * 128,
        2,
        *[9] * 64,
        3,
    ]


@pytest.mark.parametrize("ids", [[1, 2], [9, 9]])
def test_a_placeholder_without_its_image_or_an_image_without_its_placeholder_is_refused(
    ids: list[int],
) -> None:
    with pytest.raises(DataError, match="placeholders for 1 images"):
        expand_image_placeholders(ids, [image(256, 256)], QWEN3)


def test_a_folder_without_processor_files_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        ImageProcessorConfig.from_hf(tmp_path)
