"""Fast drawing of flat user interfaces on uint8 arrays: rectangles, discs, triangles, text, a pointer.

Text comes from an atlas of DejaVu glyphs (`assets/glyphs.npz`), so that no font has to be installed where screens are
generated. `python -m slime_cua.synthesis.canvas` draws the atlas anew.

Boxes are (x0, y0, x1, y1) in pixels, x1 and y1 outside. Colours are (red, green, blue), 0..255.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

Box = tuple[int, int, int, int]
Rgb = tuple[int, int, int]

ATLAS = Path(__file__).parent / "assets" / "glyphs.npz"
FONTS = ("DejaVuSans", "DejaVuSans-Bold")
SIZES_PX = (13, 15, 17, 20, 22, 24, 28, 34)
FIRST_CHAR, LAST_CHAR = 32, 126

_POINTER_ROWS = (
    "X           ",
    "XX          ",
    "X.X         ",
    "X..X        ",
    "X...X       ",
    "X....X      ",
    "X.....X     ",
    "X......X    ",
    "X.......X   ",
    "X........X  ",
    "X.....XXXXX ",
    "X..X..X     ",
    "X.X X..X    ",
    "XX  X..X    ",
    "X    X..X   ",
    "     X..X   ",
    "      XX    ",
)


def fill(pixels: np.ndarray, box: Box, rgb: Rgb) -> None:
    """Fill `box` of the contiguous uint8 image [height, width, 3]; parts outside the image are left out."""
    height, width = pixels.shape[:2]
    x0, y0, x1, y1 = max(box[0], 0), max(box[1], 0), min(box[2], width), min(box[3], height)
    if x0 < x1 and y0 < y1:
        row = np.frombuffer(bytes(rgb) * (x1 - x0), np.uint8)
        pixels.reshape(height, -1)[y0:y1, 3 * x0 : 3 * x1] = row


def frame(pixels: np.ndarray, box: Box, rgb: Rgb, width_px: int = 1) -> None:
    """Draw the border of `box`, inside it."""
    x0, y0, x1, y1 = box
    fill(pixels, (x0, y0, x1, y0 + width_px), rgb)
    fill(pixels, (x0, y1 - width_px, x1, y1), rgb)
    fill(pixels, (x0, y0, x0 + width_px, y1), rgb)
    fill(pixels, (x1 - width_px, y0, x1, y1), rgb)


def rounded(pixels: np.ndarray, box: Box, rgb: Rgb, radius_px: int) -> None:
    """Fill `box` with its corners rounded."""
    x0, y0, x1, y1 = box
    radius_px = min(radius_px, (x1 - x0) // 2, (y1 - y0) // 2)
    fill(pixels, (x0, y0 + radius_px, x1, y1 - radius_px), rgb)
    for step in range(radius_px):
        inset = radius_px - int(np.sqrt(radius_px**2 - (radius_px - step - 0.5) ** 2) + 0.5)
        fill(pixels, (x0 + inset, y0 + step, x1 - inset, y0 + step + 1), rgb)
        fill(pixels, (x0 + inset, y1 - 1 - step, x1 - inset, y1 - step), rgb)


def disc(pixels: np.ndarray, box: Box, rgb: Rgb) -> None:
    """Fill the ellipse that touches the sides of `box`, which must be inside the image."""
    x0, y0, x1, y1 = box
    pixels[y0:y1, x0:x1][_disc_mask(x1 - x0, y1 - y0)] = rgb


def triangle(pixels: np.ndarray, box: Box, rgb: Rgb) -> None:
    """Fill the triangle with its tip in the middle of the upper side of `box`."""
    x0, y0, x1, y1 = box
    pixels[y0:y1, x0:x1][_triangle_mask(x1 - x0, y1 - y0)] = rgb


def tick(pixels: np.ndarray, box: Box, rgb: Rgb) -> None:
    """Draw a check mark that fills `box`."""
    x0, y0, x1, y1 = box
    size = min(x1 - x0, y1 - y0)
    thick = max(2, size // 5)
    turn = size * 2 // 5
    for step in range(size):
        height = (turn + step) if step < turn else (2 * turn + turn // 2 - step)
        top = y0 + min(max(height * size // (2 * turn + 1), 0), size - thick)
        fill(pixels, (x0 + step, top, x0 + step + 1, top + thick), rgb)


def plus(pixels: np.ndarray, box: Box, rgb: Rgb) -> None:
    """Fill an upright cross whose bars are a third of `box` thick."""
    x0, y0, x1, y1 = box
    third_w, third_h = (x1 - x0) // 3, (y1 - y0) // 3
    fill(pixels, (x0 + third_w, y0, x1 - third_w, y1), rgb)
    fill(pixels, (x0, y0 + third_h, x1, y1 - third_h), rgb)


def saltire(pixels: np.ndarray, box: Box, rgb: Rgb, thick_px: int = 2) -> None:
    """Draw the two diagonals of `box`."""
    x0, y0, x1, y1 = box
    for step in range(min(x1 - x0, y1 - y0)):
        fill(pixels, (x0 + step, y0 + step, x0 + step + thick_px, y0 + step + 1), rgb)
        fill(pixels, (x1 - step - thick_px, y0 + step, x1 - step, y0 + step + 1), rgb)


def pointer(pixels: np.ndarray, x_px: int, y_px: int) -> None:
    """Draw an arrow pointer with its tip at (x_px, y_px)."""
    height, width = pixels.shape[:2]
    for row, line in enumerate(_POINTER_ROWS):
        for column, char in enumerate(line):
            if char != " " and y_px + row < height and x_px + column < width:
                pixels[y_px + row, x_px + column] = 0 if char == "X" else 255


def text_size(text: str, size_px: int, is_bold: bool = False) -> tuple[int, int]:
    """(width, height) in pixels of `text` in the atlas size next to `size_px`."""
    mask = _text_mask(text, _nearest(size_px), is_bold)
    return mask.shape[1], mask.shape[0]


def text(
    pixels: np.ndarray, xy: tuple[int, int], words: str, size_px: int, rgb: Rgb, is_bold: bool = False
) -> Box:
    """Write `words` with the upper left corner at `xy`; returns the box that it covers, cut at the image."""
    height, width = pixels.shape[:2]
    x0, y0 = max(xy[0], 0), max(xy[1], 0)
    mask = _text_mask(words, _nearest(size_px), is_bold)[: max(height - y0, 0), : max(width - x0, 0)]
    y1, x1 = y0 + mask.shape[0], x0 + mask.shape[1]
    under = pixels[y0:y1, x0:x1].astype(np.int16)
    weight = mask[..., None].astype(np.int16)
    over = np.asarray(rgb, np.int16)
    pixels[y0:y1, x0:x1] = under + ((over - under).astype(np.int32) * weight // 255).astype(np.int16)
    return x0, y0, x1, y1


def _nearest(size_px: int) -> int:
    return min(SIZES_PX, key=lambda known: abs(known - size_px))


@functools.lru_cache(maxsize=4096)
def _disc_mask(width_px: int, height_px: int) -> np.ndarray:
    x = (np.arange(width_px) + 0.5) * 2 / width_px - 1
    y = (np.arange(height_px) + 0.5) * 2 / height_px - 1
    return x[None] ** 2 + y[:, None] ** 2 <= 1


@functools.lru_cache(maxsize=4096)
def _triangle_mask(width_px: int, height_px: int) -> np.ndarray:
    x = np.abs((np.arange(width_px) + 0.5) * 2 / width_px - 1)
    y = (np.arange(height_px) + 0.5) / height_px
    return x[None] <= y[:, None]


@functools.lru_cache(maxsize=1)
def _atlas() -> dict[str, np.ndarray]:
    with np.load(ATLAS) as file:
        return {name: file[name] for name in file.files}


@functools.lru_cache(maxsize=16384)
def _text_mask(words: str, size_px: int, is_bold: bool) -> np.ndarray:
    """Coverage 0..255, uint8 [line height, width]: glyphs set side by side."""
    key = f"{FONTS[is_bold]}-{size_px}"
    strip, starts = _atlas()[key], _atlas()[f"{key}-starts"]
    codes = [ord(char) - FIRST_CHAR for char in words if FIRST_CHAR <= ord(char) <= LAST_CHAR]
    if not codes:
        return np.zeros((strip.shape[0], 0), np.uint8)
    return np.concatenate([strip[:, starts[code] : starts[code + 1]] for code in codes], axis=1)


def draw_atlas(font_folder: Path, path: Path = ATLAS) -> None:
    """Write the atlas: one strip of glyphs, advance by advance, for each font and size."""
    from PIL import Image, ImageDraw, ImageFont

    arrays: dict[str, np.ndarray] = {}
    for name in FONTS:
        for size_px in SIZES_PX:
            font = ImageFont.truetype(str(font_folder / f"{name}.ttf"), size_px)
            height = sum(font.getmetrics())
            chars = [chr(code) for code in range(FIRST_CHAR, LAST_CHAR + 1)]
            advances = [round(font.getlength(char)) for char in chars]
            starts = np.concatenate([[0], np.cumsum(advances)]).astype(np.int32)
            image = Image.new("L", (int(starts[-1]), height), 0)
            draw = ImageDraw.Draw(image)
            for char, start in zip(chars, starts[:-1], strict=True):
                draw.text((int(start), 0), char, fill=255, font=font)
            arrays[f"{name}-{size_px}"] = np.asarray(image)
            arrays[f"{name}-{size_px}-starts"] = starts
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    draw_atlas(Path("/usr/share/fonts/truetype/dejavu"))
