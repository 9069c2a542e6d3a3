"""Draw the next item in a thread while the caller works on the current one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterable[T], depth: int = 2) -> Iterator[T]:
    """`items`, at most `depth` ahead, drawn in a thread; errors of the source come up here. Closing ends the thread."""
    ready: queue.Queue[tuple[str, T | None, BaseException | None]] = queue.Queue(maxsize=depth)
    is_closed = threading.Event()

    def put(entry: tuple[str, T | None, BaseException | None]) -> None:
        while not is_closed.is_set():
            try:
                ready.put(entry, timeout=0.1)
                return
            except queue.Full:
                continue

    def draw() -> None:
        try:
            for item in items:
                put(("item", item, None))
                if is_closed.is_set():
                    return
            put(("end", None, None))
        except BaseException as error:
            put(("error", None, error))

    thread = threading.Thread(target=draw, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, item, error = ready.get()
            if error is not None:
                raise error
            if kind == "end":
                return
            yield item  # type: ignore[misc]
    finally:
        is_closed.set()
        thread.join(timeout=5)
