"""The `remote` provider: machines that somebody else runs, by the URL of their OSWorld or WindowsAgentArena control server.

Desktop n is the n-th URL. The machine is brought back to its clean state before each use, by a command of the operator's;
nothing of it is ever started or ended here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from urllib.parse import urlsplit

from sandbox_cluster.providers.base import CDP_PORT, PLATFORMS, VLC_PORT
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.osworld_driver import OSWorldDriver, make_ready
from sandbox_cluster.providers.osworld_http import ControlServer
from sandbox_cluster.providers.slots import Slots
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.errors import PreflightError, SandboxError

_CLEAN_ENDPOINTS = ("/setup/close_all", "/setup/clear_task_files")


class RemoteProvider:
    """Hands out remote machines, one a slot."""

    def __init__(self, config: DesktopConfig, state_dir: Path, label: str, max_boots: int = 2) -> None:
        self._config = config
        self._slots = Slots(max_boots)

    async def check(self) -> None:
        remote = self._config.remote
        if not remote.urls:
            raise PreflightError("provider=remote needs sandbox.remote.urls, one control server a desktop")
        if len(set(remote.urls)) < len(remote.urls):
            raise PreflightError("sandbox.remote.urls names a machine twice: two owners would share it")
        for url in remote.urls:
            _address(url)
        if remote.reset == "command" and not remote.reset_command:
            raise PreflightError(
                "provider=remote needs sandbox.remote.reset_command, which reverts a machine before each use "
                "(or sandbox.remote.reset=none, if tasks may see what earlier ones left)"
            )
        if remote.reset == "endpoints" and self._config.os != "windows":
            raise PreflightError(
                "sandbox.remote.reset=endpoints is there on WindowsAgentArena's servers only"
            )

    async def boot(self, slot: int) -> Desktop:
        if slot >= len(self._config.remote.urls):
            raise SandboxError(
                f"there is no machine for slot {slot}: sandbox.remote.urls has {len(self._config.remote.urls)}; "
                "num_desktops + num_spares must not be more"
            )
        return await self._slots.boot(slot, lambda: self._boot(slot))

    async def _boot(self, slot: int) -> Desktop:
        started = time.monotonic()
        config, url = self._config, self._config.remote.urls[slot]
        host, _ = _address(url)
        server = ControlServer(url, PLATFORMS[config.os])
        ports = {CDP_PORT: (host, config.remote.cdp_port), VLC_PORT: (host, config.remote.vlc_port)}

        async def end() -> None:
            self._slots.free(slot)

        driver = OSWorldDriver(server, config.screen_wh_px, ports, end)
        try:
            await self._reset(slot, url, server)
        except BaseException:
            await driver.kill()
            raise
        skew_s = await make_ready(driver, config.boot_timeout_s, config.client_password)
        return Desktop(
            driver,
            "remote",
            slot,
            boot_s=time.monotonic() - started,
            platform=server.platform,
            control_url=server.url,
            clock_skew_s=skew_s,
        )

    async def _reset(self, slot: int, url: str, server: ControlServer) -> None:
        remote = self._config.remote
        if remote.reset == "command":
            await _run(
                [part.format(slot=slot, url=url) for part in remote.reset_command], remote.reset_timeout_s
            )
        elif remote.reset == "endpoints":
            for path in _CLEAN_ENDPOINTS:
                reply = await server.call("POST", path, timeout_s=remote.reset_timeout_s)
                if reply.status != 200:
                    raise SandboxError(f"{url}{path} answered {reply.status}: the machine is not clean")

    async def reap(self) -> int:
        return 0

    async def close(self) -> None:
        await self._slots.kill_all()


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    try:
        if parts.scheme == "http" and parts.hostname and not parts.username:
            return parts.hostname, parts.port or 80
    except ValueError:
        pass
    raise PreflightError(f"sandbox.remote.urls has {url!r}; write http://HOST:PORT")


async def _run(argv: list[str], timeout_s: float) -> None:
    """Run the reset command; SandboxError with its last words when it fails."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        raise SandboxError(f"the reset command {argv[0]!r} cannot be started: {error}") from error
    try:
        async with asyncio.timeout(timeout_s):
            said, _ = await process.communicate()
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            raise SandboxError(
                f"the reset command did not end in {timeout_s:g} s; raise reset_timeout_s"
            ) from None
        raise
    if process.returncode != 0:
        raise SandboxError(
            f"the reset command failed with {process.returncode}: {said[-300:].decode(errors='replace')}"
        )
