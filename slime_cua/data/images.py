"""Screenshots by content: the bytes of a PNG under its SHA-256, written once, read by anybody on the machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from slime_cua.core.errors import DataError
from slime_cua.core.types import ImageRef

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_HEADER_BYTES = 24
_SUFFIX = ".png"


class ImageStore:
    """A folder of images: `root/ab/abcd...png`. Safe for many writers and readers; equal content is kept once.

    The oldest images go when the folder grows beyond `max_bytes` (age: the last `put` of that content).
    """

    def __init__(self, root: Path | str, max_bytes: int = 16 << 30) -> None:
        self.root = Path(root)
        self.max_bytes = max_bytes
        self.root.mkdir(parents=True, exist_ok=True)
        self._total_bytes = sum(size for _, size, _ in self._list())

    def put(self, png: bytes, width_px: int | None = None, height_px: int | None = None) -> ImageRef:
        """Keep `png`; its name and size. Raises DataError if it is no PNG or has another size than stated."""
        width, height = png_size_px(png)
        if (width_px or width, height_px or height) != (width, height):
            raise DataError(f"the PNG is {width}x{height} px, not {width_px}x{height_px} px")
        ref = ImageRef(sha256=hashlib.sha256(png).hexdigest(), width_px=width, height_px=height)
        path = self.path(ref)
        if self._is_whole(path, len(png)):
            os.utime(path)
            return ref
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
        if self._total_bytes > self.max_bytes:
            self._shrink(newest=path)
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

    def _shrink(self, newest: Path) -> None:
        """Drop the oldest until a tenth is free; another process may do the same at the same time."""
        files = sorted(self._list())
        self._total_bytes = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self._total_bytes <= self.max_bytes * 0.9:
                break
            if path != newest:
                path.unlink(missing_ok=True)
                self._total_bytes -= size


def png_size_px(png: bytes) -> tuple[int, int]:
    """(width, height) from the header. Raises DataError if these are not the bytes of a PNG."""
    if len(png) < _HEADER_BYTES or not png.startswith(_PNG_MAGIC) or png[12:16] != b"IHDR":
        raise DataError(f"{len(png)} bytes that are no PNG: a screenshot must be PNG bytes")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
