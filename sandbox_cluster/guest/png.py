"""PNG of a framebuffer, lossless and cheap, and the check that a PNG is whole."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UP = 2
ROWS_PER_BAND = 32
_ADLER_BASE = 65521
_EMPTY_LAST_BLOCK = b"\x03\x00"
_INFLATED_BYTES = 1 << 16
_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Samples a pixel of each PNG colour type."""


@dataclass(frozen=True)
class _Band:
    """Filtered rows, packed so that they can stand after any others."""

    packed: bytes
    adler: int
    num_bytes: int
    """Before they were packed."""


class ScreenPng:
    """PNG bytes (8-bit RGB) of one screen, look after look: bands of rows that are as they were keep their packed bytes.

    Every row is stored as its difference to the row above (filter `up`), which makes user interfaces mostly zeros. Bands are
    packed one by one, none refers to bytes of another, so an action that changes a line of text costs a band or two.
    Source: PNG specification (W3C), sections 9 and 11; RFC 1950 (the sum of two parts); RFC 1951 (a flush ends on a byte).
    """

    def __init__(self, wh_px: tuple[int, int]) -> None:
        self._wh_px = wh_px
        self._bands: list[_Band | None] = [None] * -(-wh_px[1] // ROWS_PER_BAND)

    def changed(self, rows: np.ndarray) -> None:
        """The pixels of these rows (numbers) are not what they were; each counts in its own band and for the row below."""
        for band in np.unique(np.concatenate([rows, rows + 1]) // ROWS_PER_BAND):
            if band < len(self._bands):
                self._bands[band] = None

    def encode(self, pixels_HW4: np.ndarray, level: int = 1) -> bytes:
        """The picture. `pixels_HW4`: uint8 [height, width, (blue, green, red, unused)]; rows not named in changed() since
        the last call are taken to be the same."""
        packer = zlib.compressobj(level, zlib.DEFLATED, -15, 9)
        for number, known in enumerate(self._bands):
            if known is None:
                self._bands[number] = _pack_band(packer, pixels_HW4, number * ROWS_PER_BAND)
        return _wrap(*self._wh_px, [band for band in self._bands if band is not None])


def encode_bgrx(pixels_HW4: np.ndarray, level: int = 1) -> bytes:
    """PNG bytes (8-bit RGB) of `pixels_HW4`, uint8 [height, width, (blue, green, red, unused)]."""
    height, width, _ = pixels_HW4.shape
    return ScreenPng((width, height)).encode(pixels_HW4, level)


def _pack_band(packer: Any, pixels_HW4: np.ndarray, first: int) -> _Band:
    """The band that begins with row `first`."""
    pixels_NW4 = pixels_HW4[first : first + ROWS_PER_BAND]
    count, width, _ = pixels_NW4.shape
    difference_NW4 = np.empty((count, width, 4), np.uint8)
    difference_NW4[0] = pixels_NW4[0] - pixels_HW4[first - 1] if first else pixels_NW4[0]
    np.subtract(pixels_NW4[1:], pixels_NW4[:-1], out=difference_NW4[1:])
    if not difference_NW4.any():
        return _rows_like_above(width, count)
    rows = np.empty((count, 1 + 3 * width), np.uint8)
    rows[:, 0] = _UP
    for plane in range(3):
        rows[:, 1 + plane :: 3] = difference_NW4[:, :, 2 - plane]
    return _pack(packer, rows.data)


def _pack(packer: Any, rows: memoryview | bytes) -> _Band:
    packed = packer.compress(rows) + packer.flush(zlib.Z_FULL_FLUSH)
    return _Band(packed, zlib.adler32(rows), len(rows) if isinstance(rows, bytes) else rows.nbytes)


def encode_solid(wh_px: tuple[int, int], rgb: tuple[int, int, int]) -> bytes:
    """PNG bytes of a screen in one colour. Only its first row is packed anew: those below are zeros whatever the colour."""
    width, height = wh_px
    first = _pack(zlib.compressobj(1, zlib.DEFLATED, -15), b"\0" + bytes(rgb) * width)
    return _wrap(width, height, [first, _rows_like_above(width, height - 1)])


@functools.lru_cache(maxsize=16)
def _rows_like_above(width: int, count: int) -> _Band:
    """`count` rows that equal the one above."""
    return _pack(zlib.compressobj(1, zlib.DEFLATED, -15), (bytes([_UP]) + bytes(3 * width)) * count)


def check_png(png: bytes, wh_px: tuple[int, int]) -> None:
    """Raise ValueError unless `png` is a whole PNG of that size: signature, chunk sums, end mark, and pixel data that can be
    decompressed to its end and is as much as the size asks for."""
    if not png.startswith(SIGNATURE):
        raise ValueError("not a PNG")
    position, kind = len(SIGNATURE), b""
    header, data = b"", []
    while kind != b"IEND":
        if position + 12 > len(png):
            raise ValueError("PNG is cut off")
        (length,) = struct.unpack_from(">I", png, position)
        kind = png[position + 4 : position + 8]
        end = position + 12 + length
        if end > len(png):
            raise ValueError("PNG is cut off")
        body = png[position + 8 : position + 8 + length]
        if struct.unpack_from(">I", png, end - 4)[0] != zlib.crc32(body, zlib.crc32(kind)):
            raise ValueError(f"PNG chunk {kind!r} is damaged")
        if kind == b"IHDR":
            header = body
        elif kind == b"IDAT":
            data.append(body)
        position = end
    if len(header) != 13:
        raise ValueError("PNG has no header")
    width, height = struct.unpack_from(">II", header)
    if (width, height) != wh_px:
        raise ValueError(f"PNG is {width}x{height}, the screen is {wh_px[0]}x{wh_px[1]}")
    if not data:
        raise ValueError("PNG has no pixels")
    if position != len(png):
        raise ValueError("PNG is followed by other bytes")
    _check_pixels(header, b"".join(data))


def _check_pixels(header: bytes, packed: bytes) -> None:
    """Decompress piece by piece: nothing as large as the screen is kept."""
    width, height, depth, colour, _, _, interlace = struct.unpack(">IIBBBBB", header)
    if colour not in _SAMPLES or interlace > 1:
        raise ValueError("PNG has an unknown colour type or interlace method")
    expected = sum(
        rows * (1 + (columns * depth * _SAMPLES[colour] + 7) // 8)
        for columns, rows in _passes(width, height, interlace)
    )
    unpacker, count = zlib.decompressobj(), 0
    try:
        while packed and not unpacker.eof and count <= expected:
            count += len(unpacker.decompress(packed, _INFLATED_BYTES))
            packed = unpacker.unconsumed_tail
    except zlib.error as error:
        raise ValueError(f"PNG pixels are damaged: {error}") from None
    if count != expected or not unpacker.eof:
        raise ValueError("PNG has more or fewer pixels than its size asks for, or they do not end")


def _passes(width: int, height: int, interlace: int) -> list[tuple[int, int]]:
    """Columns and rows of each pass that has any: one, or the seven of Adam7."""
    if not interlace:
        return [(width, height)]
    starts = (
        (0, 0, 8, 8),
        (4, 0, 8, 8),
        (0, 4, 4, 8),
        (2, 0, 4, 4),
        (0, 2, 2, 4),
        (1, 0, 2, 2),
        (0, 1, 1, 2),
    )
    sizes = [(-(-(width - x) // dx), -(-(height - y) // dy)) for x, y, dx, dy in starts]
    return [(columns, rows) for columns, rows in sizes if columns > 0 and rows > 0]


def is_black(png: bytes, wh_px: tuple[int, int]) -> bool:
    """Whether every pixel of a whole PNG is black. Costs next to nothing for one whose first row is not."""
    if len(png) > max(4096, wh_px[0] * wh_px[1] * 3 // 250) or _begins_bright(png, wh_px[0]):
        return False
    with Image.open(io.BytesIO(png)) as image:
        return not np.asarray(image.convert("RGB")).any()


def _begins_bright(png: bytes, width: int) -> bool:
    """True if the first row of an 8-bit RGB PNG has a pixel that is not black: whatever its filter, a black row is zeros."""
    at = png.find(b"IDAT")
    if at < 0 or png[24:26] != b"\x08\x02":
        return False
    (length,) = struct.unpack_from(">I", png, at - 4)
    row = zlib.decompressobj().decompress(png[at + 4 : at + 4 + min(length, 65536)], 1 + 3 * width)
    return any(row[1:])


def _wrap(width: int, height: int, bands: Sequence[_Band]) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    low, high = 1, 0
    for band in bands:
        high = (high + (band.adler >> 16) + band.num_bytes * (low - 1)) % _ADLER_BASE
        low = (low + (band.adler & 0xFFFF) - 1) % _ADLER_BASE
    checksum = struct.pack(">HH", high, low)
    data = b"".join([b"\x78\x01", *(band.packed for band in bands), _EMPTY_LAST_BLOCK, checksum])
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(body, zlib.crc32(kind)))
