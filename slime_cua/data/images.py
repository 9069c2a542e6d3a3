"""Screenshots by content: the bytes of a PNG under its SHA-256, written once, read by anybody on the machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slime_cua.core.errors import DataError, InfrastructureError
from slime_cua.core.types import ImageRef

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_HEADER_BYTES = 24
_SUFFIX = ".png"
LOOK_AGAIN_S = 1.0
"""A full store is looked through at most so often."""


class ImageStoreFullError(InfrastructureError):
    """The images that are still needed take more room than the store may have."""


@dataclass(frozen=True)
class Needs:
    """Which images must stay."""

    hashes: frozenset[str] = frozenset()
    """SHA-256 of images that somebody will read."""
    since_s: float = float("inf")
    """Unix time: whatever was put then or later is of episodes that run, and must stay, too."""


class ImageStore:
    """A folder of images: `root/ab/abcd...png`. Safe for many writers and readers; equal content is kept once.

    When the folder grows beyond `max_bytes`, images that are not needed go, oldest first (age: the last `put` of that content).
    """

    def __init__(
        self, root: Path | str, max_bytes: int = 16 << 30, needs: Callable[[], Needs] = Needs
    ) -> None:
        """needs: asked when the store is full; what it names stays."""
        self.root = Path(root)
        self.max_bytes, self._needs = max_bytes, needs
        self._full_until_s = 0.0
        self.root.mkdir(parents=True, exist_ok=True)
        self._total_bytes = sum(size for _, size, _ in self._list())

    def put(self, png: bytes, width_px: int | None = None, height_px: int | None = None) -> ImageRef:
        """Keep `png`; its name and size. Raises DataError if it is no PNG or has another size than stated.

        Raises ImageStoreFullError when what is needed alone fills the store.
        """
        width, height = png_size_px(png)
        if (width_px or width, height_px or height) != (width, height):
            raise DataError(f"the PNG is {width}x{height} px, not {width_px}x{height_px} px")
        ref = ImageRef(sha256=hashlib.sha256(png).hexdigest(), width_px=width, height_px=height)
        path = self.path(ref)
        if self._is_whole(path, len(png)):
            os.utime(path)
            return ref
        if self._total_bytes + len(png) > self.max_bytes:
            self._shrink(len(png))
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(png)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._total_bytes += len(png)
        return ref

    def get(self, ref: ImageRef) -> bytes:
        """The PNG bytes. Raises DataError if the image is not here or its file is damaged (a crash of the machine)."""
        path = self.path(ref)
        try:
            png = path.read_bytes()
        except FileNotFoundError:
            raise DataError(
                f"image {ref.sha256[:12]} is not in {self.root}: another store, or dropped beyond {self.max_bytes} bytes"
            ) from None
        if hashlib.sha256(png).hexdigest() != ref.sha256:
            raise DataError(f"{path} is damaged: its content has another hash; delete the file")
        return png

    def __contains__(self, ref: ImageRef) -> bool:
        return self.path(ref).is_file()

    def path(self, ref: ImageRef) -> Path:
        """Where the image is, or would be."""
        return self.root / ref.sha256[:2] / f"{ref.sha256}{_SUFFIX}"

    @property
    def total_bytes(self) -> int:
        """Bytes on disk, counted anew."""
        return sum(size for _, size, _ in self._list())

    def _is_whole(self, path: Path, num_bytes: int) -> bool:
        try:
            return path.stat().st_size == num_bytes
        except FileNotFoundError:
            return False

    def _list(self) -> list[tuple[float, int, Path]]:
        """(time of last put, bytes, path) of each image."""
        found = []
        for path in self.root.glob(f"*/*{_SUFFIX}"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            found.append((status.st_mtime, status.st_size, path))
        return found

    def _shrink(self, coming_bytes: int) -> None:
        """Drop the oldest that nobody needs until a tenth is free; another process may do the same at the same time."""
        if time.monotonic() < self._full_until_s:
            raise self._full()
        files = sorted(self._list())
        self._total_bytes = sum(size for _, size, _ in files)
        needs = self._needs()
        for put_s, size, path in files:
            if self._total_bytes + coming_bytes <= self.max_bytes * 0.9:
                break
            if put_s < needs.since_s and path.stem not in needs.hashes:
                path.unlink(missing_ok=True)
                self._total_bytes -= size
        if self._total_bytes + coming_bytes > self.max_bytes:
            self._full_until_s = time.monotonic() + LOOK_AGAIN_S
            raise self._full()

    def _full(self) -> ImageStoreFullError:
        return ImageStoreFullError(
            f"the image store {self.root} is full: {self._total_bytes >> 20} MiB of images that episodes and training still "
            f"need, {self.max_bytes >> 20} MiB allowed: raise rollout.max_image_bytes"
        )


def png_size_px(png: bytes) -> tuple[int, int]:
    """(width, height) from the header. Raises DataError if these are not the bytes of a PNG."""
    if len(png) < _HEADER_BYTES or not png.startswith(_PNG_MAGIC) or png[12:16] != b"IHDR":
        raise DataError(f"{len(png)} bytes that are no PNG: a screenshot must be PNG bytes")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
