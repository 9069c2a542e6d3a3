"""What getters work with: the desktop, the files they bring into the jail, and the time they have."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import httpx

from sandbox_cluster.judge.jail import Jail
from sandbox_cluster.providers.desktop import Desktop, absolute
from slime_cua.core.errors import JudgeError, SandboxError, TaskError

MAX_FILE_BYTES = 64 << 20
Argument = dict[str, Any]
"""One argument of a judge as its job writes it: {"value": JSON}, {"file": path or None}, {"files": [...]}, and with a file also
{"parse": name, "with": {...}}: what parsers.py makes of it in the jail."""


@dataclass
class Inputs:
    """Arguments of one judge, and the files they name."""

    files: dict[str, bytes] = field(default_factory=dict)
    arguments: list[Argument] = field(default_factory=list)

    def add_file(self, path: str, data: bytes | None) -> str | None:
        """The path inside the jail; the name keeps its suffix, which libraries look at."""
        if data is None:
            return None
        name = f"{len(self.files)}/{PurePosixPath(path.replace(chr(92), '/')).name or 'file'}"
        self.files[name] = data
        return f"/job/in/{name}"


@dataclass
class Scene:
    """One judge's view of a desktop."""

    desktop: Desktop
    inputs: Inputs
    cache: Mapping[str, bytes]
    """What set-up steps kept by name."""
    jail: Jail
    fetch: Callable[[str, str], Awaitable[bytes]]
    """(URL, where) -> bytes, for allowed URLs."""
    server: Any
    """OSWorld's endpoints of the desktop, an ASGI application."""
    now_s: float
    """Unix time that relative dates refer to."""
    end_mono: float
    golden: Mapping[str, bytes] = field(default_factory=dict)
    """Files as set-up wrote them, which stand in for those on the desktop: the policy may have changed its golden copy."""

    def left_s(self) -> float:
        """Seconds until this judge's deadline, never below 0.1."""
        return max(0.1, self.end_mono - time.monotonic())

    def file(self, path: str, data: bytes | None) -> Argument:
        """The argument for a file's bytes."""
        return {"file": self.inputs.add_file(path, data)}

    async def read(self, path: str) -> bytes | None:
        """The file's bytes; None when there is none, it is no regular file or the desktop's user may not read it."""
        try:
            if (place := absolute(path, self.desktop.platform)) in self.golden:
                return self.golden[place]
            return await self.desktop.get_file(path, MAX_FILE_BYTES)
        except OSError:
            return None
        except ValueError as error:
            raise TaskError(f"getter path {path!r}: {error}") from None

    async def read_first(self, paths: list[str]) -> tuple[str, bytes | None]:
        """The first of these files that is there."""
        for path in paths:
            data = await self.read(path)
            if data is not None:
                return path, data
        return paths[0], None

    async def run(self, command: Any, is_shell: bool = False, is_error: bool = False) -> str | None:
        """stdout (or stderr) of a program; None when it cannot be started."""
        left_s = self.left_s()
        try:
            reply = await self.desktop.run(command, is_shell, timeout_s=left_s)
        except OSError:
            return None
        except ValueError as error:
            raise TaskError(f"getter command {command!r}: {error}") from None
        if reply.is_timeout:
            raise TimeoutError(f"the command of a getter did not end within {left_s:.1f} s: {command!r}")
        return reply.stderr if is_error else reply.stdout

    async def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        """An answer of the desktop's control server. SandboxError for 503 (the desktop is gone)."""
        transport = httpx.ASGITransport(app=self.server)
        async with httpx.AsyncClient(transport=transport, base_url="http://guest", timeout=None) as client:
            reply = await client.request(method, path, **request)
        if reply.status_code == 503:
            raise SandboxError(f"{path}: {reply.text[:200]}")
        return reply

    async def parse(self, parser: str, data: bytes | None, name: str, **options: Any) -> Any:
        """What a parser makes of a file, in a jail of its own, when the host needs it to go on."""
        if data is None:
            return None
        inputs = Inputs()
        argument = {"file": inputs.add_file(name, data), "parse": parser, "with": options}
        job = {"kind": "parse", "func": "same", "arguments": [argument]}
        verdict = await self.jail.run(job, inputs.files, self.left_s())
        if verdict.reason is not None:
            raise JudgeError(f"{name} could not be looked into: {verdict.reason}")
        return verdict.value
