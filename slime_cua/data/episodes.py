"""Episodes on disk: one JSON object a line, appended; a crash costs at most the line that was being written."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from pathlib import Path

from pydantic import ValidationError

from slime_cua.core.errors import DataError
from slime_cua.core.files import fsync_folder
from slime_cua.core.types import Episode, EpisodeGroup


class EpisodeStore:
    """A JSONL file of EpisodeGroups with one writer at a time and any number of readers. It only grows."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.num_dropped_bytes = 0
        """Bytes of a cut last line that the latest read or append left out."""
        self.last_start = 0
        """Byte at which the line of the latest append begins."""

    def append(self, group: EpisodeGroup) -> None:
        """Add `group` durably: whole line, one write, fsync. A line cut by an earlier crash is removed first."""
        self.last_start, num_cut = _append_line(self.path, group.model_dump_json().encode())
        self.num_dropped_bytes = num_cut or self.num_dropped_bytes

    def read_at(self, start: int, group_id: str) -> EpisodeGroup:
        """The group whose line begins at byte `start`; looked for in the whole file when another is there now.

        Raises DataError when the file does not hold it.
        """
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(start)
                try:
                    group = EpisodeGroup.model_validate_json(file.readline())
                except ValidationError:
                    group = None
            if group is not None and group.group_id == group_id:
                return group
        for group in self:
            if group.group_id == group_id:
                return group
        raise DataError(
            f"{self.path} does not hold group {group_id}, which the run state still needs: bring the file back"
        )

    def since(self, num_bytes: int) -> Iterator[tuple[int, EpisodeGroup]]:
        """(byte at which its line begins, group) of all whole groups beyond the first `num_bytes`."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(num_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield num_bytes, _parse(line, f"{self.path} at byte {num_bytes}")
                num_bytes += len(line)

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
                yield _parse(line, f"{self.path}:{number}")

    @property
    def num_bytes(self) -> int:
        """Size of the file; 0 when there is none."""
        return self.path.stat().st_size if self.path.exists() else 0

    def mend(self) -> None:
        """Remove a last line that was cut by a crash."""
        if self.path.exists():
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                self.num_dropped_bytes = _cut_tail(descriptor)
            finally:
                os.close(descriptor)

    def cut(self, num_bytes: int) -> None:
        """Forget everything beyond the first `num_bytes`."""
        if self.num_bytes > num_bytes:
            with self.path.open("rb+") as file:
                file.truncate(num_bytes)
                os.fsync(file.fileno())

    def read(self) -> list[EpisodeGroup]:
        """All whole groups; `num_dropped_bytes` then says what a cut last line held."""
        return list(self)


class OpenGroups:
    """Finished episodes of groups that are not finished: a folder with one file a group, gone when the group is stored."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def append(self, episode: Episode) -> None:
        """Add `episode` durably to its group."""
        _append_line(self._path(episode.group_id), episode.model_dump_json().encode())

    def episodes(self, group_id: str, task_id: str) -> list[Episode]:
        """Finished episodes of the group, oldest first; a cut last line, and what was played for another task, is left out."""
        path = self._path(group_id)
        if not path.exists():
            return []
        found = []
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
            if line.endswith(b"\n"):
                try:
                    found.append(Episode.model_validate_json(line))
                except ValidationError as error:
                    raise DataError(f"{path}:{number}: no episode: {error.errors()[0]['msg']}") from error
        return [episode for episode in found if episode.task_id == task_id]

    def close(self, group_id: str) -> None:
        """The group is stored as a whole, or dropped: its file goes."""
        self._path(group_id).unlink(missing_ok=True)

    def keep_only(self, group_ids: Container[str]) -> None:
        """Remove files of other groups: a crash between storing a group and `close` leaves one."""
        for path in self.folder.glob("*.jsonl"):
            if path.stem not in group_ids:
                path.unlink(missing_ok=True)

    def _path(self, group_id: str) -> Path:
        return self.folder / f"{group_id}.jsonl"


def _parse(line: bytes, where: str) -> EpisodeGroup:
    try:
        return EpisodeGroup.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{where}: no episode group: {place}: {first['msg']}") from error


def _append_line(path: Path, line: bytes) -> tuple[int, int]:
    """Add a line durably; (the byte at which it begins, bytes of a cut last line that were removed)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    line += b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        num_cut = _cut_tail(descriptor)
        start = os.fstat(descriptor).st_size
        written = os.write(descriptor, line)
        while written < len(line):
            written += os.write(descriptor, line[written:])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if is_new:
        fsync_folder(path.parent)
    return start, num_cut


def _cut_tail(descriptor: int) -> int:
    """Truncate after the last line break; how many bytes went."""
    end = os.fstat(descriptor).st_size
    if end == 0 or os.pread(descriptor, 1, end - 1) == b"\n":
        return 0
    start, keep = end, 0
    while start > 0:
        step = min(start, 1 << 16)
        start -= step
        found = os.pread(descriptor, step, start).rfind(b"\n")
        if found >= 0:
            keep = start + found + 1
            break
    os.ftruncate(descriptor, keep)
    return end - keep
