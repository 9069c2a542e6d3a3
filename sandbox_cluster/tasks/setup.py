"""Runs set-up steps on a desktop, in order, inside one deadline. A step that fails ends the set-up with its number and type."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from sandbox_cluster.api import ExecuteReply
from sandbox_cluster.deadlines import tighter
from sandbox_cluster.providers.desktop import Desktop, absolute
from sandbox_cluster.tasks.browser_steps import BROWSER_STEPS
from sandbox_cluster.tasks.steps import check_step, file_bytes
from slime_cua.core.errors import SandboxError, TaskError
from slime_cua.core.files import write_atomic

UNTIL_INTERVAL_S = 0.3
UNTIL_FAILURES = 5
"""OSWorld gives a command so many failed tries."""
MAX_DOWNLOAD_BYTES = 256 << 20
_RECYCLE = (
    "Add-Type -AssemblyName Microsoft.VisualBasic; [Microsoft.VisualBasic.FileIO.FileSystem]::DeleteFile("
    "'{path}', 'OnlyErrorDialogs', 'SendToRecycleBin')"
)
_WINDOW_STEPS = {
    "open": "/setup/open_file",
    "activate_window": "/setup/activate_window",
    "close_window": "/setup/close_window",
    "change_wallpaper": "/setup/change_wallpaper",
}

MAX_KEPT_BYTES = 64 << 20
"""Of files that steps wrote, kept in the host's memory until the desktop ends."""
MAX_REDIRECTS = 5
GuestServer = Callable[[Desktop], Any]
"""Desktop -> ASGI application with OSWorld's endpoints."""


class Setup:
    """Set-up of one host: its guest servers, the URLs it may fetch, and what steps left for `cache_file` getters."""

    def __init__(
        self,
        server: GuestServer,
        allowed_urls: tuple[str, ...] = (),
        password: str = "password",
        downloads: Path | None = None,
    ) -> None:
        """`downloads`: folder of files fetched before, named by the SHA-256 of their URL; kept between runs."""
        self.server = server
        self._allowed_urls, self._password, self._downloads = allowed_urls, password, downloads
        self._caches: WeakKeyDictionary[Desktop, dict[str, bytes]] = WeakKeyDictionary()
        self._started: WeakKeyDictionary[Desktop, float] = WeakKeyDictionary()
        self._written: WeakKeyDictionary[Desktop, dict[str, bytes]] = WeakKeyDictionary()

    def started_s(self, desktop: Desktop) -> float:
        """Unix time of the desktop's first set-up: what relative dates of its task refer to until its judge."""
        return self._started.setdefault(desktop, time.time())

    def cache(self, desktop: Desktop) -> dict[str, bytes]:
        """Outputs that steps of this desktop kept by name."""
        return self._caches.setdefault(desktop, {})

    def written(self, desktop: Desktop) -> dict[str, bytes]:
        """What steps wrote, by path: golden copies as they were before anybody acted. At most MAX_KEPT_BYTES a desktop."""
        return self._written.setdefault(desktop, {})

    async def _write(self, desktop: Desktop, path: str, data: bytes) -> None:
        await desktop.put_file(path, data)
        kept, path = self.written(desktop), absolute(path, desktop.platform)
        kept.pop(path, None)
        if len(data) + sum(map(len, kept.values())) <= MAX_KEPT_BYTES:
            kept[path] = data

    async def run(self, desktop: Desktop, steps: Sequence[Mapping[str, Any]], timeout_s: float) -> float:
        """Seconds it took. Raises TaskError (a bad step), SandboxError (a step failed or took too long)."""
        start = time.monotonic()
        self.started_s(desktop)
        for index, step in enumerate(steps):
            where = f"set-up step {index} ({step.get('type')})"
            check_step(step, where, self._allowed_urls)
            left_s = start + timeout_s - time.monotonic()
            try:
                async with asyncio.timeout(max(0.01, left_s)):
                    given_s = tighter(max(0.01, left_s))
                    await self._step(desktop, step["type"], step.get("parameters", {}), where, given_s)
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
                await self._write(desktop, file["path"], file_bytes(file, where))
        elif kind == "download":
            for file in parameters["files"]:
                await self._write(desktop, file["path"], await self.fetch(file["url"], where))
        elif kind == "create_file":
            await self._write(desktop, parameters["path"], str(parameters.get("content", "")).encode())
        elif kind in BROWSER_STEPS:
            await BROWSER_STEPS[kind](desktop, parameters, left_s)
        elif kind in ("create_folder", "recycle_file"):
            await _file_step(desktop, kind, parameters["path"], left_s)
        elif kind == "execute_with_verification":
            await self._verified(desktop, parameters)
        else:
            await self._window_step(desktop, kind, parameters, where)

    async def _execute(
        self, desktop: Desktop, parameters: Mapping[str, Any], where: str, left_s: float
    ) -> None:
        command = self._filled(desktop, parameters["command"])
        is_shell, until = _is_true(parameters.get("shell")), parameters.get("until") or {}
        num_failures, end = 0, time.monotonic() + left_s
        while True:
            reply = await desktop.run(command, is_shell, timeout_s=max(0.1, end - time.monotonic()))
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

    async def fetch(self, url: str, where: str) -> bytes:
        """The bytes at an allowed URL, from the folder of downloads if they are there. Raises TaskError, SandboxError."""
        kept = self._downloads and self._downloads / hashlib.sha256(url.encode()).hexdigest()
        if kept and kept.is_file():
            return await asyncio.to_thread(kept.read_bytes)
        data = await self._download(url, where)
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(write_atomic, kept, data)
        return data

    async def _download(self, url: str, where: str) -> bytes:
        first = url
        try:
            async with httpx.AsyncClient(follow_redirects=False, timeout=30.0) as client:
                for _ in range(MAX_REDIRECTS + 1):
                    if not any(url.startswith(prefix) for prefix in self._allowed_urls):
                        raise TaskError(
                            f"{where}: {url!r} is not allowed"
                            + (f" ({first} leads there)" if url != first else "")
                            + "; start the host with --allow-url and its beginning, or bring the file by upload_file"
                        )
                    async with client.stream("GET", url) as reply:
                        if reply.next_request is not None:
                            url = str(reply.next_request.url)
                            continue
                        return await _body(reply, where)
        except httpx.HTTPError as error:
            raise SandboxError(f"{url} cannot be fetched: {type(error).__name__}") from None
        raise SandboxError(f"{first} leads on more than {MAX_REDIRECTS} times")

    async def _verified(self, desktop: Desktop, parameters: Mapping[str, Any]) -> None:
        body = {**parameters, "command": self._filled(desktop, parameters["command"])}
        reply = await self._post(desktop, "/setup/execute_with_verification", body)
        if reply.json().get("verification") != "passed":
            raise SandboxError(
                f"the command's effect was not seen: {dict(parameters.get('verification') or {})}"
            )

    async def _window_step(
        self, desktop: Desktop, kind: str, parameters: Mapping[str, Any], where: str
    ) -> None:
        await self._post(desktop, _WINDOW_STEPS[kind], parameters)

    async def _post(self, desktop: Desktop, path: str, body: Mapping[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.server(desktop))
        async with httpx.AsyncClient(transport=transport, base_url="http://guest", timeout=None) as client:
            reply = await client.post(path, json=dict(body))
        if reply.status_code != 200:
            raise SandboxError(f"the desktop answered {reply.status_code}: {reply.text[:300]}")
        return reply

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


async def _body(reply: httpx.Response, where: str) -> bytes:
    if reply.status_code != 200:
        raise SandboxError(f"{reply.url} answered {reply.status_code}")
    parts, size = [], 0
    async for part in reply.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > MAX_DOWNLOAD_BYTES:
            raise TaskError(f"{where}: {reply.url} has more than {MAX_DOWNLOAD_BYTES >> 20} MiB")
    return b"".join(parts)


async def _file_step(desktop: Desktop, kind: str, path: str, left_s: float) -> None:
    """A new folder; a file into the bin, as the file manager does it."""
    if desktop.platform.is_windows:
        make, bin_it = f'New-Item -ItemType Directory -Force -Path "{path}"', _RECYCLE.format(path=path)
        argv = ["powershell", "-NoProfile", "-Command", make if kind == "create_folder" else bin_it]
    else:
        argv = ["mkdir", "-p", path] if kind == "create_folder" else ["gio", "trash", path]
    reply = await desktop.run(argv, timeout_s=left_s)
    if reply.returncode != 0:
        raise SandboxError(f"{path}: {(reply.stderr or reply.stdout).strip()[-300:]}")


def _is_true(value: Any) -> bool:
    """Task files write true and "true"."""
    return value in (True, "true", "True")


def _holds(until: Mapping[str, Any], reply: ExecuteReply) -> bool:
    return (
        ("returncode" in until and reply.returncode == until["returncode"])
        or ("stdout" in until and until["stdout"] in reply.stdout)
        or ("stderr" in until and until["stderr"] in reply.stderr)
    )
