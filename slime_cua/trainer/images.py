"""Screenshots to the patches that the vision tower reads.

Legend: I images of one size, C colour channels, P patches.
"""

from __future__ import annotations

import io
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from slime_cua.convert import read_config
from slime_cua.core.errors import ConfigError, DataError
from slime_cua.core.types import ImageRef
from slime_cua.data.expand import ImageProcessorConfig, resized_wh_px


class ImageSource(Protocol):
    """Where the bytes of an image are."""

    def get(self, ref: ImageRef) -> bytes:
        """Encoded bytes (PNG) of the image."""
        ...


@dataclass(frozen=True)
class PatchConfig:
    """How pixels become patches; read from preprocessor_config.json."""

    tokens: ImageProcessorConfig
    temporal_patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_hf(cls, hf_dir: Path | str) -> PatchConfig:
        """Read a Hugging Face folder; of a text model, that no id is an image's. Raises ConfigError naming the missing field."""
        if "vision_config" not in read_config(hf_dir):
            return TEXT_ONLY
        tokens = ImageProcessorConfig.from_hf(hf_dir)
        plain = json.loads((Path(hf_dir) / "preprocessor_config.json").read_text())
        try:
            mean, std = tuple(plain["image_mean"]), tuple(plain["image_std"])
        except KeyError as error:
            raise ConfigError(f"{hf_dir}/preprocessor_config.json has no {error}") from None
        return cls(tokens, int(plain.get("temporal_patch_size", 2)), mean, std)

    @property
    def num_features(self) -> int:
        """Numbers in a patch."""
        return len(self.mean) * self.temporal_patch_size * self.tokens.patch_size_px**2

    def grid_hw(self, width_px: int, height_px: int) -> tuple[int, int]:
        """(rows, columns) of patches of an image of this size."""
        width, height = resized_wh_px(width_px, height_px, self.tokens)
        return height // self.tokens.patch_size_px, width // self.tokens.patch_size_px

    def token_grid(self, width_px: int, height_px: int) -> tuple[int, int]:
        """(rows, columns) of image tokens of an image of this size."""
        rows, columns = self.grid_hw(width_px, height_px)
        return rows // self.tokens.merge_size, columns // self.tokens.merge_size


TEXT_ONLY = PatchConfig(
    ImageProcessorConfig(image_token_id=-1, patch_size_px=16, merge_size=2, min_pixels=1, max_pixels=1),
    temporal_patch_size=2,
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
)


def patchify(pixels_IHWC: torch.Tensor, config: PatchConfig) -> torch.Tensor:
    """fp32 patches [P, C * time * patch * patch] of uint8 images whose sides are multiples of patch * merge.

    Order of patches: images, then blocks of merge x merge patches in reading order, then inside a block. Runs on the
    device of `pixels_IHWC`. Source: patchify of transformers' Qwen2-VL image processor (the layout, restated).
    """
    num, height, width, channels = pixels_IHWC.shape
    size, merge = config.tokens.patch_size_px, config.tokens.merge_size
    mean, std = (pixels_IHWC.new_tensor(x, dtype=torch.float32) for x in (config.mean, config.std))
    x = (pixels_IHWC.float() / 255.0 - mean) / std
    x = x.reshape(num, height // (size * merge), merge, size, width // (size * merge), merge, size, channels)
    x = x.permute(0, 1, 4, 2, 5, 7, 3, 6).unsqueeze(6)
    x = x.expand(*x.shape[:6], config.temporal_patch_size, *x.shape[7:])
    return x.reshape(num * (height // size) * (width // size), -1)


class ImageLoader:
    """Decodes and resizes images, keeping the most recent ones."""

    def __init__(self, config: PatchConfig, max_images: int = 256) -> None:
        self.config = config
        self._max_images = max_images
        self._recent: OrderedDict[str, NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()

    def pixels(self, ref: ImageRef, source: ImageSource) -> NDArray[np.uint8]:
        """uint8 [height, width, 3] at the size the model sees.

        Raises DataError when the bytes are no image or have another size than `ref` says.
        """
        with self._lock:
            found = self._recent.pop(ref.sha256, None)
        if found is None:
            found = self._decode(ref, source.get(ref))
        with self._lock:
            self._recent[ref.sha256] = found
            while len(self._recent) > self._max_images:
                self._recent.popitem(last=False)
        return found

    def _decode(self, ref: ImageRef, encoded: bytes) -> NDArray[np.uint8]:
        try:
            image = Image.open(io.BytesIO(encoded)).convert("RGB")
        except OSError as error:
            raise DataError(f"image {ref.sha256}: {error}") from error
        if image.size != (ref.width_px, ref.height_px):
            raise DataError(
                f"image {ref.sha256} is {image.size}, its reference says {(ref.width_px, ref.height_px)}"
            )
        wanted = resized_wh_px(ref.width_px, ref.height_px, self.config.tokens)
        if image.size != wanted:
            image = image.resize(wanted, Image.Resampling.BICUBIC)
        return np.asarray(image)


class DecodeAhead:
    """Decodes the next micro-batch's images in a thread while the device works on the current one.

    An image that cannot be read is no error here: whoever needs its pixels gets it.
    """

    def __init__(
        self, loader: ImageLoader, source: ImageSource | None, is_known: Callable[[str], bool]
    ) -> None:
        self._loader, self._source, self._is_known = loader, source, is_known
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
        self._running: Future[None] | None = None

    def start(self, refs: Sequence[ImageRef]) -> None:
        """Begin with `refs`; those whose features are known are left out."""
        if self._source is not None and refs:
            self._running = self._pool.submit(self._decode, tuple(refs), self._source)

    def wait(self) -> None:
        """Until what was started last is decoded."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def __enter__(self) -> DecodeAhead:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _decode(self, refs: tuple[ImageRef, ...], source: ImageSource) -> None:
        for ref in refs:
            if not self._is_known(ref.sha256):
                try:
                    self._loader.pixels(ref, source)
                except Exception:
                    return
