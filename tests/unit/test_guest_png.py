"""Our PNG writer against Pillow's reader, and the check against every way of damage."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from sandbox_cluster.guest.png import ROWS_PER_BAND, ScreenPng, check_png, encode_bgrx, encode_solid, is_black


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


def edit(pixels_HW4: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Change a block, or none; the numbers of the rows it was in."""
    height, width, _ = pixels_HW4.shape
    top, left = random.integers(height), random.integers(width)
    rows = np.arange(top, min(height, top + random.integers(0, 3)))
    pixels_HW4[rows, left : left + 1 + random.integers(width)] = random.integers(0, 256, 4)
    return rows


@pytest.mark.parametrize(
    "height", [1, ROWS_PER_BAND - 1, ROWS_PER_BAND, ROWS_PER_BAND + 1, 5 * ROWS_PER_BAND + 7]
)
def test_a_screen_that_was_changed_row_by_row_reads_back_as_it_is_now(height: int) -> None:
    random = np.random.default_rng(height)
    pixels = np.zeros((height, 21, 4), np.uint8)
    screen = ScreenPng((21, height))
    for number in range(60):
        png = screen.encode(pixels)
        check_png(png, (21, height))
        assert np.array_equal(pillow(png), pixels[:, :, [2, 1, 0]]), number
        for _ in range(random.integers(1, 4)):
            screen.changed(edit(pixels, random))


def test_only_bands_of_changed_rows_are_packed_anew() -> None:
    """Seen by a change that is not named: its band keeps the old picture, and a named one beside it does not."""
    pixels = np.random.default_rng(3).integers(0, 256, (3 * ROWS_PER_BAND, 8, 4), dtype=np.uint8)
    before = pixels.copy()
    screen = ScreenPng((8, 3 * ROWS_PER_BAND))
    screen.encode(pixels)
    pixels[5] ^= 255
    pixels[-5] ^= 255
    screen.changed(np.array([3 * ROWS_PER_BAND - 5]))
    seen = pillow(screen.encode(pixels))
    assert np.array_equal(seen[:ROWS_PER_BAND], before[:ROWS_PER_BAND, :, [2, 1, 0]])
    assert np.array_equal(seen[-ROWS_PER_BAND:], pixels[-ROWS_PER_BAND:, :, [2, 1, 0]])


def chunks(header: bytes, packed: bytes) -> bytes:
    """A PNG whose chunk sums are right, whatever is in them."""
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, body in ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b"")):
        parts.append(struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)))
    return b"".join(parts)


HEADER = struct.pack(">IIBBBBB", 8, 6, 8, 2, 0, 0, 0)
ROWS = b"".join(b"\0" + bytes(range(row, row + 24)) for row in range(6))


@pytest.mark.parametrize(
    "packed",
    [
        zlib.compress(ROWS[:-1]),
        zlib.compress(ROWS[:25]),
        zlib.compress(ROWS + b"\0"),
        zlib.compress(ROWS)[:-6],
        zlib.compress(ROWS)[:-4],
        zlib.compress(ROWS)[:-4] + bytes(4),
        b"\x78\x01" + bytes([255]) * 40,
        zlib.compress(bytes(30 << 20)),
    ],
    ids=[
        "a byte short",
        "one row",
        "a byte too many",
        "cut",
        "no sum",
        "another sum",
        "no deflate stream",
        "a bomb",
    ],
)
def test_pixels_that_cannot_be_read_to_their_end_are_refused_though_the_chunk_sums_are_right(
    packed: bytes,
) -> None:
    check_png(chunks(HEADER, zlib.compress(ROWS)), (8, 6))
    with pytest.raises(ValueError, match="pixels"):
        check_png(chunks(HEADER, packed), (8, 6))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_pictures_of_other_writers_are_taken_in_every_colour_type(mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (13, 7)).save(file, "PNG")
    check_png(file.getvalue(), (13, 7))


@pytest.mark.parametrize("wh_px", [(1, 1), (3, 2), (13, 11)])
def test_an_interlaced_picture_is_whole_with_the_pixels_of_its_seven_passes(wh_px: tuple[int, int]) -> None:
    """Written pass by pass as the PNG specification, section 8.2, draws them; Pillow reads the same picture."""
    width, height = wh_px
    pattern = ("16462646", "77777777", "56565656", "77777777", "36463646", "77777777", "56565656", "77777777")
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    rows = b""
    for number in "1234567":
        for y in range(height):
            line = [pixels[y, x].tobytes() for x in range(width) if pattern[y % 8][x % 8] == number]
            rows += b"\0" + b"".join(line) if line else b""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 1)
    png = chunks(header, zlib.compress(rows))
    assert np.array_equal(pillow(png), pixels)
    check_png(png, wh_px)
    with pytest.raises(ValueError, match="pixels"):
        check_png(chunks(header, zlib.compress(rows[:-1])), wh_px)
