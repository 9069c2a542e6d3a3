"""Coordinate spaces and the one conversion between them (I11)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict

Space = Literal["grid1000", "pixels"]
"""`grid1000`: the model's grid, 0..1000 on both axes. `pixels`: desktop pixels; screenshots are taken at desktop size."""

GRID = 1000


class Point(BaseModel):
    """A position in a named space, e.g. Point(x=500, y=250, space="grid1000")."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    x: float
    y: float
    space: Space = "grid1000"


def to_pixels(point: Point, screen_wh_px: tuple[int, int]) -> tuple[int, int]:
    """Desktop pixel of `point`: x_px = floor(x / 1000 * width + 0.5), clamped to the screen.

    Raises ValueError for a point outside its space (grid: 0..1000; pixels: 0..size inclusive) or not finite.
    """
    width, height = screen_wh_px
    limit_x, limit_y = (GRID, GRID) if point.space == "grid1000" else (width, height)
    if not (math.isfinite(point.x) and math.isfinite(point.y)) or not (
        0 <= point.x <= limit_x and 0 <= point.y <= limit_y
    ):
        raise ValueError(
            f"point ({point.x}, {point.y}) is outside {point.space}: x must be in 0..{limit_x}, y in 0..{limit_y}"
        )
    scale_x, scale_y = width / limit_x, height / limit_y
    x_px = math.floor(point.x * scale_x + 0.5)
    y_px = math.floor(point.y * scale_y + 0.5)
    return min(x_px, width - 1), min(y_px, height - 1)


def to_grid(x_px: float, y_px: float, screen_wh_px: tuple[int, int]) -> Point:
    """The grid point of a desktop pixel, rounded to whole grid steps."""
    width, height = screen_wh_px
    return Point(
        x=math.floor(x_px / width * GRID + 0.5), y=math.floor(y_px / height * GRID + 0.5), space="grid1000"
    )
