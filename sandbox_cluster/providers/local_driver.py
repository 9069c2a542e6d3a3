"""The driver of a local desktop: X connection, framebuffer and agent link of one sandbox."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sandbox_cluster.api import ExecuteReply, Settle
from sandbox_cluster.guest.events import InputEvent, Pause, parted
from sandbox_cluster.guest.home import WM_CONFIG, home_files, x_resources
from sandbox_cluster.guest.link import AgentLink, read_memory_file, socket_of
from sandbox_cluster.guest.player import Player
from sandbox_cluster.guest.screen import Framebuffer
from sandbox_cluster.guest.x11 import ANSWER_S, XConnection
from sandbox_cluster.providers.base import DEFAULT_FILE_BYTES, Capture, Command
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.errors import SandboxError

R = TypeVar("R")
ANSWER_TIMEOUT_S = 20.0
"""For a file or a process start; programs get their own time-out on top."""
MIN_POLL_S = 0.01
WM_POLL_S = 0.01
AT_LAUNCHER = "/usr/libexec/at-spi-bus-launcher"


class Workers:
    """Threads of a provider. Waits for X servers must not hold back encoding, nor more encoders run than there are cores."""

    def __init__(self, num_waiting: int = 64) -> None:
        self._waiting = ThreadPoolExecutor(num_waiting, thread_name_prefix="desktop-x")
        self._encoding = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="desktop-png")

    async def wait_for(self, work: Callable[..., R], *arguments: Any) -> R:
        """`work(*arguments)`, which mostly waits."""
        return await asyncio.get_running_loop().run_in_executor(self._waiting, work, *arguments)

    async def encode(self, work: Callable[..., R], *arguments: Any) -> R:
        """`work(*arguments)`, which mostly computes."""
        return await asyncio.get_running_loop().run_in_executor(self._encoding, work, *arguments)

    def close(self) -> None:
        self._waiting.shutdown(wait=False)
        self._encoding.shutdown(wait=False)


class LocalDriver:
    """One running local desktop. `end` is the provider's way to take the sandbox down."""

    def __init__(
        self, config: DesktopConfig, link: AgentLink, workers: Workers, end: Callable[[], Awaitable[None]]
    ) -> None:
        self._config = config
        self._link = link
        self._workers = workers
        self._end = end
        self._x_lock = threading.Lock()
        """A caller that went away leaves its thread at work: the next one waits for it."""
        self._clearing: asyncio.Task[None] | None = None
        self._x: XConnection | None = None
        self._player: Player | None = None
        self._screen: Framebuffer | None = None

    @property
    def screen_wh_px(self) -> tuple[int, int]:
        return self._config.screen_wh_px

    @property
    def is_alive(self) -> bool:
        return not self._link.ended.is_set()

    async def start(self) -> None:
        """HOME, X, window manager, in this order; returns when the window manager answers."""
        ask, wait_s = self._link.ask, self._config.boot_timeout_s
        files = home_files(self._config)
        entries = [[file.path, file.mode, len(file.data)] for file in files]
        data = b"".join(file.data for file in files)
        unpacked, _ = await asyncio.gather(ask("unpack", {"entries": entries}, wait_s, data), self._start_x())
        unpacked.close()
        await self._start_window_manager()
        self._parts_needed()[0].be_patient(ANSWER_S)
        if self._config.accessibility:
            await self._start_accessibility()

    async def _start_accessibility(self) -> None:
        """The bus on which GTK and Qt programs tell what they show; it costs 26 MB and every program some start-up time."""
        values = {"NO_AT_BRIDGE": None, "GTK_MODULES": "gail:atk-bridge", "QT_ACCESSIBILITY": "1"}
        (await self._link.ask("environment", {"values": values}, ANSWER_TIMEOUT_S)).close()
        argv = (AT_LAUNCHER, "--launch-immediately", "--a11y=1")
        await self._run(Command(argv, cwd="/", is_detached=True))

    async def _start_window_manager(self) -> None:
        argv = ("openbox", "--sm-disable", "--config-file", WM_CONFIG)
        await self._run(Command(argv, cwd="/", is_detached=True))
        try:
            async with asyncio.timeout(self._config.boot_timeout_s):
                while not await self._workers.wait_for(self._has_window_manager):  # noqa: ASYNC110
                    await asyncio.sleep(WM_POLL_S)
        except TimeoutError:
            raise SandboxError(f"no window manager within {self._config.boot_timeout_s:g} s") from None

    async def _start_x(self) -> None:
        with await self._link.ask("start_x", {}, self._config.boot_timeout_s) as answer:
            connection = socket_of(answer.take())
            self._screen = Framebuffer(answer.take(), self.screen_wh_px)
        await self._connect_x(connection, self._config.boot_timeout_s)

    async def _connect_x(self, connection: socket.socket, answer_s: float = ANSWER_S) -> None:
        """answer_s: a boot has one deadline for all; a server that many boots hold up is slow and not dead."""
        self._x = await self._workers.wait_for(XConnection, connection, answer_s)
        self._player = await self._workers.wait_for(self._dress)

    async def _clear(self) -> None:
        """Bring back a screen that does not answer; goes on to its end when the caller goes away, one at a time.

        Our agent and Xvfb are out of the programs' reach; what holds them up is a program that closed our connection,
        grabbed the X server, or used up all processes. The policy started it: its episode goes on. Programs are ended
        only if a fresh connection gets no answer, either, while the agent does answer: a slow machine is no grab.
        """
        if self._clearing is None or self._clearing.done():
            self._clearing = asyncio.ensure_future(self._clear_once())
            self._clearing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._clearing)

    async def _clear_once(self) -> None:
        try:
            await self._reconnect()
        except SandboxError:
            await self._end_programs()
            await self._reconnect()
            await self._start_window_manager()

    async def _reconnect(self) -> None:
        with await self._link.ask("screen", {}, ANSWER_TIMEOUT_S) as answer:
            connection = socket_of(answer.take())
        if self._x is not None:
            self._x.close()
        await self._connect_x(connection)

    async def _end_programs(self) -> None:
        (await self._link.ask("end_programs", {}, ANSWER_TIMEOUT_S)).close()

    async def play(self, events: Sequence[InputEvent]) -> None:
        try:
            await self._workers.wait_for(self._sync)
        except SandboxError:
            await self._clear()
        try:
            for part in parted(events):
                if isinstance(part, Pause):
                    await asyncio.sleep(part.seconds)
                else:
                    await self._workers.wait_for(self._play, part)
        except OSError as error:
            raise SandboxError(f"the desktop's screen is gone: {error}") from error

    async def capture(self, settle: Settle) -> Capture:
        try:
            return await self._capture(settle)
        except SandboxError:
            await self._clear()
            return await self._capture(settle)

    async def _capture(self, settle: Settle) -> Capture:
        try:
            is_settled = await self._settle(settle)
            screen = self._parts_needed()[2]
            png = await self._workers.encode(screen.last_png)
        except OSError as error:
            raise SandboxError(f"the desktop's screen is gone: {error}") from error
        return Capture(png, *self.screen_wh_px, time_s=time.time(), is_settled=is_settled)

    async def connect(self, port: int) -> socket.socket:
        with await self._link.ask("connect", {"port": port}, ANSWER_TIMEOUT_S) as answer:
            connection = socket_of(answer.take())
        connection.setblocking(False)
        return connection

    async def run(self, command: Command) -> ExecuteReply:
        try:
            return await self._run(command)
        except BlockingIOError:
            await self._end_programs()
            await self._start_window_manager()
            return await self._run(command)

    async def _run(self, command: Command) -> ExecuteReply:
        values = {
            "argv": command.argv,
            "cwd": command.cwd,
            "timeout": command.timeout_s,
            "cap": command.max_output_bytes,
            "merged": command.is_merged,
            "detached": command.is_detached,
            "suffix": command.script_suffix,
        }
        wait_s = ANSWER_TIMEOUT_S + (0 if command.is_detached else command.timeout_s)
        with await self._link.ask("run", values, wait_s, command.script) as answer:
            texts = [
                read_memory_file(file, command.max_output_bytes).decode(errors="replace")
                for file in answer.files
            ]
            stdout, stderr = (*texts, "", "")[:2]
            code = answer.values.get("rc")
            return ExecuteReply(
                stdout=stdout,
                stderr=stderr,
                returncode=code if isinstance(code, int) else None,
                is_timeout=bool(answer.values.get("timeout")),
                is_truncated=bool(answer.values.get("cut")),
            )

    async def put_file(self, path: str, data: bytes) -> None:
        (await self._link.ask("put", {"path": path}, ANSWER_TIMEOUT_S, data)).close()

    async def get_file(self, path: str, max_bytes: int = DEFAULT_FILE_BYTES) -> bytes:
        with await self._link.ask("get", {"path": path, "max": max_bytes}, ANSWER_TIMEOUT_S) as answer:
            file = answer.files[0] if answer.files else answer.take()
            return await self._workers.encode(read_memory_file, file, max_bytes)

    async def kill(self) -> None:
        self._link.close()
        for part in (self._x, self._screen):
            if part is not None:
                part.close()
        await self._end()

    def _parts_needed(self) -> tuple[XConnection, Player, Framebuffer]:
        if self._x is None or self._player is None or self._screen is None or not self.is_alive:
            raise SandboxError("the desktop is gone")
        return self._x, self._player, self._screen

    async def _settle(self, settle: Settle) -> bool:
        """Read the screen until it stayed equal for quiet_ms (true) or max_ms are over (false)."""
        started = changed = time.monotonic()
        picture = await self._workers.wait_for(self._look)
        quiet_s, max_s = settle.quiet_ms / 1000, settle.max_ms / 1000
        while max_s > 0:
            now = time.monotonic()
            if now - changed >= quiet_s:
                return True
            if now - started >= max_s:
                return False
            await asyncio.sleep(max(MIN_POLL_S, min(quiet_s / 2, started + max_s - now)))
            read_s = time.monotonic()
            previous, picture = picture, await self._workers.wait_for(self._look)
            if picture != previous:
                changed = read_s
        return False

    def _look(self) -> int:
        """Number of the picture on the screen, with everything drawn that the X server was asked for so far."""
        screen = self._parts_needed()[2]
        self._sync()
        return screen.read()

    def _sync(self) -> None:
        x = self._parts_needed()[0]
        with self._x_lock:
            x.sync()

    def _play(self, events: list[InputEvent]) -> None:
        player = self._parts_needed()[1]
        with self._x_lock:
            player.play(events)

    def _dress(self) -> Player:
        x = self._x
        assert x is not None
        if tuple(x.wh_px) != self.screen_wh_px:
            raise SandboxError(f"the X screen is {x.wh_px}, not {self.screen_wh_px}")
        x.set_text_property(x.root, "RESOURCE_MANAGER", x_resources(self._config))
        x.set_background(int(self._config.background[1:], 16))
        x.sync()
        return Player(x)

    def _has_window_manager(self) -> bool:
        x = self._parts_needed()[0] if self._player else None
        # openbox sets _NET_SUPPORTING_WM_CHECK early: a window mapped right then is now and then never shown
        return x is not None and bool(x.property_words(x.root, "_NET_SHOWING_DESKTOP"))
