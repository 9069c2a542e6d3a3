"""What makes the start of a heavy process cheap: the cycle collector rests while libraries are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """A block that imports torch, transformers or Megatron.

    Imports make a million objects that live as long as the process. The collector would walk all of them each time their
    number has grown by a quarter, which is a fifth of the start; after the block it leaves them out for good (gc.freeze),
    so that later collections look at what the process itself made.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
