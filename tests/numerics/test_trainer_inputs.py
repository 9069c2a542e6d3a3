"""What the trainer feeds the model equals what transformers' processor and model make of the same images."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from slime_cua.core.errors import DataError
from slime_cua.core.types import ImageRef
from slime_cua.trainer.images import ImageLoader, PatchConfig, patchify
from slime_cua.trainer.streams import expand_streams
from tests.numerics.tiny_models import IMAGE_TOKEN, make_qwen35
from tests.numerics.trainer_cases import MemoryStore


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen35(tmp_path_factory.mktemp("inputs") / "model")


@pytest.mark.parametrize("size_wh", [(96, 64), (64, 96), (101, 75), (20, 20), (333, 40)])
def test_patches_equal_transformers_processor_also_when_resized(
    folder: Path, size_wh: tuple[int, int]
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    store = MemoryStore()
    pixels = np.random.default_rng(1).integers(0, 255, (size_wh[1], size_wh[0], 3), dtype=np.uint8)
    ref = store.put(pixels)
    config = PatchConfig.from_hf(folder)
    found = patchify(torch.tensor(ImageLoader(config).pixels(ref, store))[None], config)
    wanted = Qwen2VLImageProcessorPil.from_pretrained(folder)(Image.fromarray(pixels), return_tensors="pt")
    assert [1, *config.grid_hw(*size_wh)] == wanted["image_grid_thw"][0].tolist()
    torch.testing.assert_close(found, wanted["pixel_values"], atol=1e-6, rtol=0)


def test_images_of_one_size_are_patched_together_as_one_by_one(folder: Path) -> None:
    config = PatchConfig.from_hf(folder)
    pixels = torch.randint(
        0, 255, (3, 64, 96, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    one_by_one = torch.cat([patchify(image[None], config) for image in pixels])
    torch.testing.assert_close(patchify(pixels, config), one_by_one, atol=0, rtol=0)


def test_positions_equal_transformers_rope_index(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    ids = np.array([8, IMAGE_TOKEN, 9, 9, IMAGE_TOKEN, 8, IMAGE_TOKEN, 8])
    grids = np.array([[2, 3], [1, 4], [3, 1]])
    streams = expand_streams(ids, np.array([len(ids)]), grids, IMAGE_TOKEN)
    expanded = torch.from_numpy(streams.token_ids_T)[None]
    wanted = model.model.get_rope_index(
        expanded,
        mm_token_type_ids=(expanded == IMAGE_TOKEN).long(),
        image_grid_thw=torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in grids.tolist()]),
    )[0]
    assert torch.equal(torch.from_numpy(streams.positions_3T), wanted[:, 0])


def test_bytes_that_are_no_image_or_of_another_size_are_refused_by_name(folder: Path) -> None:
    loader, store = ImageLoader(PatchConfig.from_hf(folder)), MemoryStore()
    ref = store.put(np.zeros((64, 96, 3), dtype=np.uint8))
    wrong = ImageRef(sha256=ref.sha256, width_px=64, height_px=64)
    with pytest.raises(DataError, match=rf"{ref.sha256} is \(96, 64\), its reference says \(64, 64\)"):
        loader.pixels(wrong, store)

    class Broken:
        def get(self, ref: ImageRef) -> bytes:
            return io.BytesIO(b"no image").getvalue()

    with pytest.raises(DataError, match=ref.sha256):
        loader.pixels(ref, Broken())


def test_decoded_images_are_kept_and_the_oldest_forgotten(folder: Path) -> None:
    store = MemoryStore()
    refs = [store.put(np.full((64, 64, 3), shade, dtype=np.uint8)) for shade in (1, 2, 3)]
    loader = ImageLoader(PatchConfig.from_hf(folder), max_images=2)
    for ref in refs:
        loader.pixels(ref, store)
    store._png.clear()
    assert loader.pixels(refs[2], store)[0, 0, 0] == 3
    with pytest.raises(KeyError):
        loader.pixels(refs[0], store)
