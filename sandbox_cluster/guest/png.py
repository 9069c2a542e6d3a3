"""PNG of a framebuffer, lossless and cheap, and the check that a PNG is whole."""

from __future__ import annotations

import functools
import io
import struct
import zlib

import numpy as np
from PIL import Image

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UP = 2


def encode_bgrx(pixels_HW4: np.ndarray, level: int = 1) -> bytes:
    """PNG bytes (8-bit RGB) of `pixels_HW4`, uint8 [height, width, (blue, green, red, unused)].

    Every row is stored as its difference to the row above (filter `up`), which makes user interfaces mostly zeros.
    Source: PNG specification (W3C), sections 9 and 11.
    """
    height, width, _ = pixels_HW4.shape
    difference_HW4 = np.empty((height, width, 4), np.uint8)
    difference_HW4[0] = pixels_HW4[0]
    np.subtract(pixels_HW4[1:], pixels_HW4[:-1], out=difference_HW4[1:])
    rows = np.empty((height, 1 + 3 * width), np.uint8)
    rows[:, 0] = _UP
    for plane in range(3):
        rows[:, 1 + plane :: 3] = difference_HW4[:, :, 2 - plane]
    packer = zlib.compressobj(level, zlib.DEFLATED, 15, 9, zlib.Z_DEFAULT_STRATEGY)
    data = packer.compress(rows.data) + packer.flush()
    return _wrap(width, height, data)


def encode_solid(wh_px: tuple[int, int], rgb: tuple[int, int, int]) -> bytes:
    """PNG bytes of a screen in one colour. Only its first row is compressed anew: those below are zeros whatever the colour."""
    width, height = wh_px
    first = b"\0" + bytes(rgb) * width
    below, packed_below = _rows_like_above(width, height - 1)
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    packed = packer.compress(first) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = struct.pack(">I", zlib.adler32(below, zlib.adler32(first)))
    return _wrap(width, height, b"\x78\x01" + packed + packed_below + checksum)


@functools.lru_cache(maxsize=8)
def _rows_like_above(width: int, count: int) -> tuple[bytes, bytes]:
    """`count` rows that equal the one above, and the same as the end of a deflate stream."""
    rows = (bytes([_UP]) + bytes(3 * width)) * count
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    return rows, packer.compress(rows) + packer.flush()


def check_png(png: bytes, wh_px: tuple[int, int]) -> None:
    """Raise ValueError unless `png` is a whole PNG of that size: signature, chunk sums, end mark, amount of pixel data."""
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


def _wrap(width: int, height: int, data: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(body, zlib.crc32(kind)))
