"""Screenshots of the next micro-batch are decoded in a thread; errors come up where pixels are needed; costs are the model's."""

import hashlib
import io
import threading

import numpy as np
import pytest
from PIL import Image

from slime_cua.core.errors import DataError
from slime_cua.core.types import ImageRef
from slime_cua.data.expand import ImageProcessorConfig
from slime_cua.trainer.flops import cost_model, forward_flops
from slime_cua.trainer.images import DecodeAhead, ImageLoader, PatchConfig
from slime_cua.trainer.sizes import PRESETS, ModelShape

CONFIG = PatchConfig(
    ImageProcessorConfig(
        image_token_id=6, patch_size_px=16, merge_size=2, min_pixels=1024, max_pixels=1 << 24
    ),
    2,
    (0.5,) * 3,
    (0.5,) * 3,
)


class Source:
    """PNGs by hash; notes who asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.png: dict[str, bytes] = {}

    def add(self, seed: int) -> ImageRef:
        pixels = np.random.default_rng(seed).integers(0, 255, (64, 96, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        name = hashlib.sha256(file.getvalue()).hexdigest()
        self.png[name] = file.getvalue()
        return ImageRef(sha256=name, width_px=96, height_px=64)

    def get(self, ref: ImageRef) -> bytes:
        self.asked.append((ref.sha256, threading.current_thread().name))
        return self.png[ref.sha256]


def test_what_was_started_is_decoded_once_in_the_thread_and_known_images_not_at_all() -> None:
    source, loader = Source(), ImageLoader(CONFIG)
    first, second = source.add(1), source.add(2)
    with DecodeAhead(loader, source, lambda name: name == second.sha256) as ahead:
        ahead.start([first, second])
        ahead.wait()
        pixels = loader.pixels(first, source)
    assert [name for name, _ in source.asked] == [first.sha256]
    assert source.asked[0][1].startswith("decode")
    assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(source.png[first.sha256]))))


def test_a_broken_image_is_an_error_by_name_only_where_its_pixels_are_needed() -> None:
    source, loader = Source(), ImageLoader(CONFIG)
    good, bad = source.add(1), source.add(2)
    source.png[bad.sha256] = b"no image"
    with DecodeAhead(loader, source, lambda name: False) as ahead:
        ahead.start([bad, good])
        ahead.wait()
        loader.pixels(good, source)
        with pytest.raises(DataError, match=bad.sha256):
            loader.pixels(bad, source)


def test_without_a_source_nothing_is_started() -> None:
    with DecodeAhead(ImageLoader(CONFIG), None, lambda name: False) as ahead:
        ahead.start([Source().add(1)])
        ahead.wait()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("is_frozen", [True, False])
def test_costs_are_proportional_to_training_flops(name: str, is_frozen: bool) -> None:
    """One segment of 9,000 tokens, 6,110 of them of five images of 4,888 patches. The tower's own attention is left out."""
    shape = ModelShape.from_config(PRESETS[name])
    model = cost_model(shape, is_frozen)
    flops = forward_flops(shape, [9000], 600, [4888] * 5)
    scores = 4 * shape.vision.depth * shape.vision.hidden * 5 * 4888**2
    wanted = flops.training(is_frozen) - scores * (1 if is_frozen else 3)
    one_token = forward_flops(shape, [1], 0, [])
    unit = 3 * (one_token.projections + one_token.recurrence) / model.per_token
    assert model.cost(9000, 6110, 600) * unit == pytest.approx(wanted, rel=1e-3)
