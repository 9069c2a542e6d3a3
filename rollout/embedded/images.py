"""Images of requests, by content: decoded once, seen by the vision tower once a weight generation.

Legend: P patches of an image, M image tokens (P / merge^2), C channels times patch volume, H hidden.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollout.embedded.prompt import Grid

_MAX_PIXELS = 64
"""Images whose patches wait for the vision tower; those of earlier ones are made again from the bytes when needed."""


class PreparedImage:
    """One image content: its bytes, its grid and, when computed, its patches and features."""

    def __init__(self, sha256: str, data: bytes, grid: Grid, pixels_PC: Tensor) -> None:
        self.sha256 = sha256
        self.data = data
        self.grid = grid
        self.pixels_PC: Tensor | None = pixels_PC
        self.features_MH: Tensor | None = None
        self.features_generation = -1
        """Generation of the vision weights that made `features_MH`."""


class ImageStore:
    """Least recently used images, shared by the HTTP threads and the model thread.

    Example: store.prepare(["data:image/png;base64,iVBOR..."])[0].grid == (1, 24, 40) for a 640x384 screenshot.
    """

    def __init__(self, model_folder: Path, max_images: int) -> None:
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(model_folder)
        self._max_images = max_images
        self._images: OrderedDict[str, PreparedImage] = OrderedDict()
        self._with_pixels: deque[PreparedImage] = deque()
        self._lock = threading.Lock()

    @property
    def merge_size(self) -> int:
        return int(self._processor.merge_size)

    def prepare(self, image_data: Sequence[str]) -> list[PreparedImage]:
        """Images of one request in order. Raises ValueError naming the image that is not base64 or not an image."""
        return [self._prepare(index, text) for index, text in enumerate(image_data)]

    def pixels(self, image: PreparedImage) -> Tensor:
        """Patches (P, C) in fp32, made again from the bytes when they were dropped."""
        pixels_PC = image.pixels_PC
        return pixels_PC if pixels_PC is not None else self._preprocess(image.data)[0]

    def _prepare(self, index: int, text: str) -> PreparedImage:
        try:
            data = base64.b64decode(text.partition(";base64,")[2] or text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"image_data[{index}] is not base64 or a data URI: {error}") from None
        sha256 = hashlib.sha256(data).hexdigest()
        with self._lock:
            known = self._images.get(sha256)
            if known is not None:
                self._images.move_to_end(sha256)
                return known
        try:
            pixels_PC, grid = self._preprocess(data)
        except (UnidentifiedImageError, OSError, ValueError) as error:
            raise ValueError(f"image_data[{index}] is not a readable image: {error}") from None
        with self._lock:
            image = self._images.setdefault(sha256, PreparedImage(sha256, data, grid, pixels_PC))
            while len(self._images) > self._max_images:
                self._images.popitem(last=False)
            self._with_pixels.append(image)
            if len(self._with_pixels) > _MAX_PIXELS:
                self._with_pixels.popleft().pixels_PC = None
        return image

    def _preprocess(self, data: bytes) -> tuple[Tensor, Grid]:
        with Image.open(io.BytesIO(data)) as opened:
            picture = opened.convert("RGB")
        batch: Any = self._processor(images=[picture], return_tensors="pt")
        frames, rows, columns = batch["image_grid_thw"][0].tolist()
        return torch.as_tensor(batch["pixel_values"]), (frames, rows, columns)
