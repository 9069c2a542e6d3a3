"""The host's end of the control socket to the agent inside a desktop.

Packets and files as described in agent.py. What comes out of a desktop is bounded before it is used: packet size, number
of files, size of each memory file. The end of the socket is the end of the desktop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import stat
from dataclasses import dataclass, field
from typing import Any

from slime_cua.core.errors import SandboxError

PACKET_BYTES = 60_000
MAX_FILES = 4


@dataclass
class Answer:
    """An answer and the files that came with it. Whoever asked closes them (`with answer:`)."""

    values: dict[str, Any]
    files: list[int] = field(default_factory=list)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self.files:
            os.close(self.files.pop())

    def take(self, index: int = 0) -> int:
        """Hand out a file; the taker closes it. SandboxError when there is none."""
        if index >= len(self.files):
            raise SandboxError("the desktop's agent sent too few files")
        return self.files.pop(index)


class AgentLink:
    """Asks the agent and matches its answers; used inside one event loop."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._control.setblocking(False)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(control.fileno(), self._on_readable)
        self.ended = asyncio.Event()
        """Set when the desktop is gone."""

    async def ask(
        self, op: str, values: dict[str, Any], timeout_s: float, data: bytes | None = None
    ) -> Answer:
        """One operation with an optional file. OSError as the desktop gave it; SandboxError when it is gone or silent."""
        number = next(self._numbers)
        future: asyncio.Future[Answer] = self._loop.create_future()
        files = [] if data is None else [memory_file(data)]
        try:
            async with asyncio.timeout(timeout_s):
                self._waiting[number] = future
                await self._send({"id": number, "op": op, **values}, files)
                answer = await future
        except TimeoutError:
            raise SandboxError(f"the desktop did not answer {op!r} in {timeout_s:g} s") from None
        finally:
            self._waiting.pop(number, None)
            for file in files:
                os.close(file)
        if "errno" in answer.values:
            with answer:
                number = int(answer.values["errno"])
                raise OSError(
                    number, str(answer.values.get("error", "")), values.get("path") or _program(values)
                )
        return answer

    def close(self) -> None:
        """Let go of the socket (which ends the agent) and fail whoever waits. May be repeated."""
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
        self.ended.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxError("the desktop is gone"))
        self._waiting.clear()

    async def _send(self, request: dict[str, Any], files: list[int]) -> None:
        packet = json.dumps(request).encode()
        body = None
        if len(packet) > PACKET_BYTES:
            body, packet = memory_file(packet), b"@"
        try:
            attached = files if body is None else [body, *files]
            while True:
                if self.ended.is_set():
                    raise SandboxError("the desktop is gone")
                try:
                    socket.send_fds(self._control, [packet], attached)
                    return
                except BlockingIOError:
                    await asyncio.sleep(0.01)
                except OSError as error:
                    self.close()
                    raise SandboxError(f"the desktop is gone: {error}") from error
        finally:
            if body is not None:
                os.close(body)

    def _on_readable(self) -> None:
        try:
            data, files, flags, _ = socket.recv_fds(
                self._control, 2 * PACKET_BYTES, MAX_FILES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            _close_all(files)
            self.close()
            return
        try:
            if data == b"@":
                body = files.pop(0)
                try:
                    data = read_memory_file(body, 16 << 20)
                finally:
                    os.close(body)
            values = json.loads(data)
            future = self._waiting.get(values["id"])
        except (ValueError, KeyError, TypeError, IndexError, SandboxError):
            _close_all(files)
            self.close()
            return
        if future is None or future.done():
            _close_all(files)
        else:
            future.set_result(Answer(values, files))


def memory_file(data: bytes) -> int:
    """An anonymous memory file with `data`; the caller closes it."""
    file = os.memfd_create("data", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
    except BaseException:
        os.close(file)
        raise
    return file


def read_memory_file(file: int, max_bytes: int) -> bytes:
    """The bytes of a memory file that came out of a desktop. SandboxError when it is something else or too large."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise SandboxError("the desktop's agent sent something that is no file")
    if status.st_size > max_bytes:
        raise SandboxError(f"the desktop's agent sent {status.st_size} bytes, more than {max_bytes}")
    parts, position = [], 0
    while position < status.st_size:
        chunk = os.pread(file, min(1 << 20, status.st_size - position), position)
        if not chunk:
            raise SandboxError("the desktop's agent cut a file that it sent")
        parts.append(chunk)
        position += len(chunk)
    return b"".join(parts)


def socket_of(file: int) -> socket.socket:
    """The stream socket behind a file that came out of a desktop. SandboxError, and it is closed, otherwise."""
    if stat.S_ISSOCK(os.fstat(file).st_mode):
        taken = socket.socket(fileno=file)
        if taken.type == socket.SOCK_STREAM:
            return taken
        taken.close()
    else:
        os.close(file)
    raise SandboxError("the desktop's agent sent something that is no stream socket")


def _program(values: dict[str, Any]) -> str | None:
    argv = values.get("argv")
    return str(argv[0]) if argv else None


def _close_all(files: list[int]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)
