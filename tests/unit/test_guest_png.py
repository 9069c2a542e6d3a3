"""Our PNG writer against Pillow's reader, and the check against every way of damage."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from sandbox_cluster.guest.png import check_png, encode_bgrx, encode_solid, is_black


def pillow(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


@pytest.mark.parametrize("wh_px", [(1, 1), (1, 7), (9, 1), (640, 384), (801, 603)])
def test_pillow_reads_back_every_pixel_of_random_screens(wh_px: tuple[int, int]) -> None:
    width, height = wh_px
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 4), dtype=np.uint8)
    png = encode_bgrx(pixels)
    assert np.array_equal(pillow(png), pixels[:, :, [2, 1, 0]])
    check_png(png, wh_px)


def test_a_view_into_padded_lines_encodes_as_its_own_pixels() -> None:
    lines = np.random.default_rng(1).integers(0, 256, (5, 4 * 6 + 8), dtype=np.uint8)
    view = lines[:, :24].reshape(5, 6, 4)
    assert np.array_equal(pillow(encode_bgrx(view)), view[:, :, [2, 1, 0]])


def test_a_solid_screen_has_one_colour() -> None:
    png = encode_solid((30, 20), (10, 200, 30))
    check_png(png, (30, 20))
    assert (pillow(png) == (10, 200, 30)).all() and pillow(png).shape == (20, 30, 3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda png: png[: len(png) // 2], "cut off"),
        (lambda png: png[:-12], "cut off"),
        (lambda png: b"", "not a PNG"),
        (lambda png: b"<html>" + png, "not a PNG"),
        (lambda png: png[:60] + bytes([png[60] ^ 1]) + png[61:], "damaged"),
        (lambda png: png + b"x", "followed by"),
    ],
)
def test_damaged_pictures_are_refused_by_name(damage, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        check_png(damage(encode_solid((64, 64), (1, 2, 3))), (64, 64))


def test_a_picture_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="64x32, the screen is 64x64"):
        check_png(encode_solid((64, 32), (1, 2, 3)), (64, 64))


def test_black_is_every_pixel_black_in_any_kind_of_png() -> None:
    size = (64, 48)
    for mode in ("RGB", "RGBA", "L", "P"):
        for place, expected in ((None, True), ((0, 0), False), ((63, 47), False)):
            image = Image.new("RGB", size)
            if place is not None:
                image.putpixel(place, (0, 0, 9))
            file = io.BytesIO()
            # Gray and palettes keep no faint blue: those pixels are white instead.
            (image.point(lambda value: 255 if value else 0) if mode in "LP" else image).convert(mode).save(
                file, "PNG"
            )
            assert is_black(file.getvalue(), size) is expected, (mode, place)
    pixels_HW4 = np.zeros((48, 64, 4), np.uint8)
    assert is_black(encode_bgrx(pixels_HW4), size)
    pixels_HW4[0, 0, 2] = 1
    assert not is_black(encode_bgrx(pixels_HW4), size)
    assert not is_black(encode_solid(size, (0, 0, 1)), size)
