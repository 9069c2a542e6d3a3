"""Runs set-up steps on a desktop, in order, inside one deadline. A step that fails ends the set-up with its number and type."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from sandbox_cluster.api import ExecuteReply
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.tasks.steps import check_step, file_bytes
from slime_cua.core.errors import SandboxError, TaskError

UNTIL_INTERVAL_S = 0.3
UNTIL_FAILURES = 5
"""OSWorld gives a command so many failed tries."""
MAX_DOWNLOAD_BYTES = 256 << 20
PASSWORD = "password"
_WINDOW_STEPS = {
    "open": "/setup/open_file",
    "activate_window": "/setup/activate_window",
    "close_window": "/setup/close_window",
    "change_wallpaper": "/setup/change_wallpaper",
}

GuestServer = Callable[[Desktop], Any]
"""Desktop -> ASGI application with OSWorld's endpoints."""


class Setup:
    """Set-up of one host: its guest servers, the URLs it may fetch, and what steps left for `cache_file` getters."""

    def __init__(
        self, server: GuestServer, allowed_urls: tuple[str, ...] = (), password: str = PASSWORD
    ) -> None:
        self._server, self._allowed_urls, self._password = server, allowed_urls, password
        self._caches: WeakKeyDictionary[Desktop, dict[str, bytes]] = WeakKeyDictionary()

    def cache(self, desktop: Desktop) -> dict[str, bytes]:
        """Outputs that steps of this desktop kept by name."""
        return self._caches.setdefault(desktop, {})

    async def run(self, desktop: Desktop, steps: Sequence[Mapping[str, Any]], timeout_s: float) -> float:
        """Seconds it took. Raises TaskError (a bad step), SandboxError (a step failed or took too long)."""
        start = time.monotonic()
        for index, step in enumerate(steps):
            where = f"set-up step {index} ({step.get('type')})"
            check_step(step, where, self._allowed_urls)
            left_s = start + timeout_s - time.monotonic()
            try:
                async with asyncio.timeout(max(0.01, left_s)):
                    await self._step(desktop, step["type"], step.get("parameters", {}), where, left_s)
            except TimeoutError:
                raise SandboxError(f"{where} did not end: the set-up has {timeout_s:g} s") from None
            except OSError as error:
                raise SandboxError(f"{where} failed: {error}") from None
            except SandboxError as error:
                raise SandboxError(f"{where} failed: {error}") from error
        return time.monotonic() - start

    async def _step(
        self, desktop: Desktop, kind: str, parameters: Mapping[str, Any], where: str, left_s: float
    ) -> None:
        if kind == "sleep":
            await asyncio.sleep(parameters["seconds"])
        elif kind in ("execute", "command"):
            await self._execute(desktop, parameters, where, left_s)
        elif kind == "launch":
            command = self._filled(desktop, parameters["command"])
            is_shell = _is_true(parameters.get("shell"))
            await desktop.launch(command, is_shell)
        elif kind == "upload_file":
            for file in parameters["files"]:
                await desktop.put_file(file["path"], file_bytes(file, where))
        elif kind == "download":
            for file in parameters["files"]:
                await desktop.put_file(file["path"], await self._download(file["url"], where))
        else:
            await self._window_step(desktop, kind, parameters, where)

    async def _execute(
        self, desktop: Desktop, parameters: Mapping[str, Any], where: str, left_s: float
    ) -> None:
        command = self._filled(desktop, parameters["command"])
        is_shell, until = _is_true(parameters.get("shell")), parameters.get("until") or {}
        num_failures = 0
        while True:
            reply = await desktop.run(command, is_shell, timeout_s=max(0.1, left_s))
            for name in ("stdout", "stderr"):
                if parameters.get(name):
                    self.cache(desktop)[parameters[name]] = getattr(reply, name).encode()
            if reply.is_timeout:
                raise SandboxError(f"the command did not end within {left_s:.1f} s")
            if not until or _holds(until, reply):
                return
            num_failures += reply.returncode != 0
            if num_failures >= UNTIL_FAILURES:
                said = (reply.stderr or reply.stdout).strip()[-300:]
                raise SandboxError(
                    f"`until` {dict(until)} did not come true; exit {reply.returncode}: {said}"
                )
            await asyncio.sleep(UNTIL_INTERVAL_S)

    async def _download(self, url: str, where: str) -> bytes:
        parts, size = [], 0
        try:
            async with (
                httpx.AsyncClient(follow_redirects=False, timeout=30.0) as client,
                client.stream("GET", url) as reply,
            ):
                if reply.status_code != 200:
                    raise SandboxError(f"{url} answered {reply.status_code}")
                async for part in reply.aiter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > MAX_DOWNLOAD_BYTES:
                        raise TaskError(f"{where}: {url} has more than {MAX_DOWNLOAD_BYTES >> 20} MiB")
        except httpx.HTTPError as error:
            raise SandboxError(f"{url} cannot be fetched: {type(error).__name__}") from None
        return b"".join(parts)

    async def _window_step(
        self, desktop: Desktop, kind: str, parameters: Mapping[str, Any], where: str
    ) -> None:
        transport = httpx.ASGITransport(app=self._server(desktop))
        async with httpx.AsyncClient(transport=transport, base_url="http://guest", timeout=None) as client:
            reply = await client.post(_WINDOW_STEPS[kind], json=dict(parameters))
        if reply.status_code != 200:
            raise SandboxError(f"the desktop answered {reply.status_code}: {reply.text[:300]}")

    def _filled(self, desktop: Desktop, command: Any) -> Any:
        width, height = desktop.screen_wh_px
        values = {
            "{CLIENT_PASSWORD}": self._password,
            "{SCREEN_WIDTH}": str(width),
            "{SCREEN_HEIGHT}": str(height),
            "{SCREEN_WIDTH_HALF}": str(width // 2),
            "{SCREEN_HEIGHT_HALF}": str(height // 2),
        }

        def fill(text: str) -> str:
            for mark, value in values.items():
                text = text.replace(mark, value)
            return text

        return fill(command) if isinstance(command, str) else [fill(part) for part in command]


def _is_true(value: Any) -> bool:
    """Task files write true and "true"."""
    return value in (True, "true", "True")


def _holds(until: Mapping[str, Any], reply: ExecuteReply) -> bool:
    return (
        ("returncode" in until and reply.returncode == until["returncode"])
        or ("stdout" in until and until["stdout"] in reply.stdout)
        or ("stderr" in until and until["stderr"] in reply.stderr)
    )
