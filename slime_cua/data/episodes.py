"""Episode groups on disk: one JSON object a line, appended; a crash costs at most the line that was being written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from slime_cua.core.errors import DataError
from slime_cua.core.files import write_atomic
from slime_cua.core.types import EpisodeGroup


class EpisodeStore:
    """A JSONL file of EpisodeGroups with one writer at a time and any number of readers."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.num_dropped_bytes = 0
        """Bytes of a cut last line that the latest read or append left out."""

    def append(self, group: EpisodeGroup) -> None:
        """Add `group` durably: whole line, one write, fsync. A line cut by an earlier crash is removed first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = group.model_dump_json().encode() + b"\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._cut_tail(descriptor)
            written = os.write(descriptor, line)
            while written < len(line):
                written += os.write(descriptor, line[written:])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def __iter__(self) -> Iterator[EpisodeGroup]:
        """All whole groups, oldest first. Raises DataError naming file and line for a whole line that is not a group."""
        self.num_dropped_bytes = 0
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    self.num_dropped_bytes = len(line)
                    return
                try:
                    yield EpisodeGroup.model_validate_json(line)
                except ValidationError as error:
                    first = error.errors()[0]
                    where = ".".join(str(part) for part in first["loc"])
                    raise DataError(
                        f"{self.path}:{number}: no episode group: {where}: {first['msg']}"
                    ) from error

    @property
    def num_bytes(self) -> int:
        """Size of the file; 0 when there is none."""
        return self.path.stat().st_size if self.path.exists() else 0

    def rewind(self, num_bytes: int, is_kept: Callable[[EpisodeGroup], bool]) -> list[EpisodeGroup]:
        """Take out the groups beyond the first `num_bytes` for which `is_kept` is false; gives those that stay.

        The file is replaced as a whole: a crash leaves the old one or the new one.
        """
        if self.num_bytes <= num_bytes:
            return []
        head = self.path.read_bytes()[:num_bytes]
        late: list[EpisodeGroup] = []
        place = 0
        for group, line in zip(self, self.path.open("rb"), strict=False):
            place += len(line)
            if place > num_bytes and is_kept(group):
                late.append(group)
        tail = b"".join(group.model_dump_json().encode() + b"\n" for group in late)
        write_atomic(self.path, head + tail)
        return late

    def read(self) -> list[EpisodeGroup]:
        """All whole groups; `num_dropped_bytes` then says what a cut last line held."""
        return list(self)

    def _cut_tail(self, descriptor: int) -> None:
        """Truncate after the last line break."""
        end = os.fstat(descriptor).st_size
        if end == 0 or os.pread(descriptor, 1, end - 1) == b"\n":
            return
        start, keep = end, 0
        while start > 0:
            step = min(start, 1 << 16)
            start -= step
            found = os.pread(descriptor, step, start).rfind(b"\n")
            if found >= 0:
                keep = start + found + 1
                break
        self.num_dropped_bytes = end - keep
        os.ftruncate(descriptor, keep)
