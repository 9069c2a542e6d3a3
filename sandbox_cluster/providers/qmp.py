"""QEMU's monitor protocol on an inherited socket: no path that others could open. Source: QEMU, QMP specification."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterable
from typing import Any

from slime_cua.core.errors import SandboxError

ANSWER_S = 30.0
_FORWARD = re.compile(r"TCP\[HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)\s+\S+\s+(\d+)")


class Monitor:
    """One monitor; commands one after the other. Raises SandboxError when QEMU refuses or is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._lock = asyncio.Lock()

    @classmethod
    async def open(cls, sock: socket.socket, timeout_s: float) -> Monitor:
        """The monitor at the other end of `sock`, greeted."""
        sock.setblocking(False)
        monitor = cls(*await asyncio.open_connection(sock=sock))
        try:
            async with asyncio.timeout(timeout_s):
                await monitor._line()
                await monitor.command("qmp_capabilities")
        except BaseException:
            monitor.close()
            raise
        return monitor

    async def command(self, name: str, **arguments: Any) -> Any:
        """The command's return value."""
        body: dict[str, Any] = {"execute": name}
        if arguments:
            body["arguments"] = arguments
        async with self._lock:
            try:
                self._writer.write(json.dumps(body).encode() + b"\n")
                await self._writer.drain()
            except OSError as error:
                raise SandboxError(f"qemu is gone: {error}") from error
            while True:
                answer = await self._line()
                if "error" in answer:
                    raise SandboxError(f"qemu refuses {name}: {answer['error'].get('desc')}")
                if "return" in answer:
                    return answer["return"]

    async def human(self, line: str) -> str:
        """A command of the human monitor, which answers nothing when it went well."""
        said = str(await self.command("human-monitor-command", **{"command-line": line}))
        if said.lower().startswith("error"):
            raise SandboxError(f"qemu refuses {line!r}: {said.strip()}")
        return said

    async def published(self, ports: Iterable[int]) -> dict[int, int]:
        """Port inside -> port on loopback here, as QEMU picked them."""
        async with asyncio.timeout(ANSWER_S):
            said = await self.human("info usernet")
        found = {int(inside): int(here) for here, inside in _FORWARD.findall(said)}
        missing = set(ports) - set(found)
        if missing:
            raise SandboxError(f"qemu publishes no port for {sorted(missing)}: {said.strip()}")
        return found

    def close(self) -> None:
        self._writer.close()

    async def _line(self) -> dict[str, Any]:
        line = await self._reader.readline()
        if not line:
            raise SandboxError("qemu ended")
        value: dict[str, Any] = json.loads(line)
        return value
