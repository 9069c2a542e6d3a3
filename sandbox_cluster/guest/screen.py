"""A desktop's screen: the X server's framebuffer file, read as it is, without a process and without a copy through X.

Xvfb keeps the picture in an XWD file (`-fbdir`), pointer included. A program inside may truncate or overwrite that file,
so it is read with preadv into our own buffer (never mapped), and a short read is an error of the desktop.
Source: X11 `XWDFile.h` (header of 25 big-endian words, then the colour map, then the pixels).
"""

from __future__ import annotations

import os
import struct
import threading

import numpy as np

from sandbox_cluster.guest.png import ScreenPng
from slime_cua.core.errors import SandboxError

_HEADER_WORDS, _COLOUR_BYTES = 25, 12
_HEADER_SIZE, _WIDTH, _HEIGHT, _BITS, _BYTES_PER_LINE, _NUM_COLOURS = 0, 4, 5, 11, 12, 19


class Framebuffer:
    """The framebuffer file of one desktop. Blocking; safe to use from several threads."""

    def __init__(self, file: int, screen_wh_px: tuple[int, int]) -> None:
        """Take over the open `file`. SandboxError when it is not the picture of such a screen."""
        self._file = file
        self._wh_px = screen_wh_px
        self._lock = threading.Lock()
        header = os.pread(file, 4 * _HEADER_WORDS, 0)
        if len(header) < 4 * _HEADER_WORDS:
            raise SandboxError("the framebuffer file has no header")
        words = struct.unpack(f">{_HEADER_WORDS}I", header)
        width, height = screen_wh_px
        self._line_bytes = words[_BYTES_PER_LINE]
        if (words[_WIDTH], words[_HEIGHT], words[_BITS]) != (
            width,
            height,
            32,
        ) or self._line_bytes < 4 * width:
            raise SandboxError(
                f"the framebuffer is {words[_WIDTH]}x{words[_HEIGHT]} at {words[_BITS]} bits, not {width}x{height}"
            )
        self._offset = words[_HEADER_SIZE] + words[_NUM_COLOURS] * _COLOUR_BYTES
        self._pixels, self._spare = (np.zeros((height, self._line_bytes), np.uint8) for _ in range(2))
        self._num_changes = 0
        self._encoder = ScreenPng(screen_wh_px)
        self._encoded: tuple[int, bytes] | None = None

    def read(self) -> int:
        """Read the screen now; how many reads found another picture than the one before. SandboxError for a short read."""
        with self._lock:
            return self._read()

    def last_png(self) -> bytes:
        """The picture of the last read() as PNG."""
        with self._lock:
            return self._encode()

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _read(self) -> int:
        if self._file < 0:
            raise SandboxError("the desktop is gone")
        count = os.preadv(self._file, [self._spare.data], self._offset)
        if count != self._spare.nbytes:
            raise SandboxError("the framebuffer file is too short: a program on the desktop cut it")
        rows = np.flatnonzero((self._spare.view(np.uint32) != self._pixels.view(np.uint32)).any(axis=1))
        if rows.size:
            self._encoder.changed(rows)
            self._num_changes += 1
            self._pixels, self._spare = self._spare, self._pixels
        return self._num_changes

    def _encode(self) -> bytes:
        if self._encoded is None or self._encoded[0] != self._num_changes:
            width, height = self._wh_px
            pixels_HW4 = self._pixels[:, : 4 * width].reshape(height, width, 4)
            self._encoded = (self._num_changes, self._encoder.encode(pixels_HW4))
        return self._encoded[1]
