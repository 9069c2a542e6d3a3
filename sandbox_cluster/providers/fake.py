"""A desktop that is not there: for tests of gateway, host and rollout on machines without X.

Honest about what it does: files live in a dict, the screen has one colour that changes with every event, programs are the
few words of `fake_programs`, and each played event is a line of `/home/user/events.log`, so a test can count what really
happened. Faults are set on `FakeProvider.faults`.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox_cluster.api import ExecuteReply, Settle
from sandbox_cluster.guest.events import InputEvent, Pause
from sandbox_cluster.guest.png import encode_solid
from sandbox_cluster.providers.base import DEFAULT_FILE_BYTES, HOME, Capture, Command
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.fake_programs import Files, run_program
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.errors import PreflightError, SandboxError

EVENT_LOG = f"{HOME}/events.log"


@dataclass
class Faults:
    """What goes wrong, and how slow things are. Change it at any time; it counts for all desktops of the provider."""

    latency_s: float = 0.0
    """Added to every call of a desktop."""
    boot_s: float = 0.0
    is_unfit: bool = False
    """check() fails."""
    num_failing_boots: int = 0
    """So many boots from now on fail."""
    num_lost_replies: int = 0
    """So many plays or runs from now on happen, then raise as if the answer was lost."""
    num_broken_screenshots: int = 0
    """So many captures from now on are cut off."""
    num_hung_screenshots: int = 0
    """So many captures from now on never end."""
    num_black_screenshots: int = 0
    """So many captures from now on are black."""
    num_deaths: int = 0
    """So many plays or runs from now on end their desktop before anything is played."""


class FakeDriver:
    """One desktop in memory."""

    def __init__(self, screen_wh_px: tuple[int, int], faults: Faults) -> None:
        self._screen_wh_px = screen_wh_px
        self._faults = faults
        self._is_alive = True
        self.files: Files = {EVENT_LOG: b""}
        self.ports: dict[int, int] = {}
        """Port inside -> port of a listener on this machine's loopback, which a test puts there."""

    @property
    def screen_wh_px(self) -> tuple[int, int]:
        return self._screen_wh_px

    @property
    def is_alive(self) -> bool:
        return self._is_alive

    async def play(self, events: Sequence[InputEvent]) -> None:
        await self._enter(can_die=True)
        for event in events:
            if isinstance(event, Pause):
                await asyncio.sleep(event.seconds)
                self._still_alive()
            self.files[EVENT_LOG] = self.files.get(EVENT_LOG, b"") + f"{event!r}\n".encode()
        self._lose_reply()

    async def capture(self, settle: Settle) -> Capture:
        await self._enter()
        if self._faults.num_hung_screenshots > 0:
            self._faults.num_hung_screenshots -= 1
            await asyncio.Event().wait()
        png = encode_solid(self._screen_wh_px, self._colour())
        if self._faults.num_black_screenshots > 0:
            self._faults.num_black_screenshots -= 1
            png = encode_solid(self._screen_wh_px, (0, 0, 0))
        if self._faults.num_broken_screenshots > 0:
            self._faults.num_broken_screenshots -= 1
            png = png[: len(png) // 2]
        return Capture(png, *self._screen_wh_px, time_s=time.time(), is_settled=settle.max_ms > 0)

    async def run(self, command: Command) -> ExecuteReply:
        await self._enter(can_die=True)
        outcome = await run_program(command, self.files)
        self._still_alive()
        self._lose_reply()
        return outcome

    async def put_file(self, path: str, data: bytes) -> None:
        await self._enter()
        if path in ("/", HOME) or path.endswith("/"):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
        self.files[path] = data

    async def get_file(self, path: str, max_bytes: int = DEFAULT_FILE_BYTES) -> bytes:
        await self._enter()
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        data = self.files[path]
        if len(data) > max_bytes:
            raise OSError(errno.EFBIG, f"file has {len(data)} bytes, more than {max_bytes}", path)
        return data

    async def connect(self, port: int) -> socket.socket:
        await self._enter()
        if port not in self.ports:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens on port {port}")
        connection = socket.socket()
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.ports[port]))
        return connection

    async def kill(self) -> None:
        self._is_alive = False

    async def _enter(self, can_die: bool = False) -> None:
        self._still_alive()
        await asyncio.sleep(self._faults.latency_s)
        if can_die and self._faults.num_deaths > 0:
            self._faults.num_deaths -= 1
            self._is_alive = False
        self._still_alive()

    def _still_alive(self) -> None:
        if not self._is_alive:
            raise SandboxError("the desktop is gone")

    def _lose_reply(self) -> None:
        if self._faults.num_lost_replies > 0:
            self._faults.num_lost_replies -= 1
            raise SandboxError("the desktop did not answer in time")

    def _colour(self) -> tuple[int, int, int]:
        digest = hashlib.sha256(self.files.get(EVENT_LOG, b"")).digest()
        return digest[0], digest[1], digest[2]


class FakeProvider:
    """Makes FakeDrivers. `drivers` has the living ones by slot."""

    def __init__(self, config: DesktopConfig, state_dir: Path, label: str, max_boots: int = 2) -> None:
        self._config = config
        self._boots = asyncio.Semaphore(max_boots)
        self.faults = Faults()
        self.drivers: dict[int, FakeDriver] = {}

    async def check(self) -> None:
        if self.faults.is_unfit:
            raise PreflightError("fake desktops were told to be unfit; set faults.is_unfit = False")

    async def boot(self, slot: int) -> Desktop:
        previous = self.drivers.get(slot)
        if previous is not None and previous.is_alive:
            raise SandboxError(f"slot {slot} has a desktop; kill it first")
        async with self._boots:
            started = time.monotonic()
            await asyncio.sleep(self.faults.boot_s)
            if self.faults.num_failing_boots > 0:
                self.faults.num_failing_boots -= 1
                raise SandboxError(f"desktop {slot} did not boot")
            driver = FakeDriver(self._config.screen_wh_px, self.faults)
            self.drivers[slot] = driver
            return Desktop(driver, "fake", slot, boot_s=time.monotonic() - started)

    async def reap(self) -> int:
        return 0

    async def close(self) -> None:
        for driver in self.drivers.values():
            await driver.kill()
        self.drivers.clear()
