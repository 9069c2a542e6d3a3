"""Desktop: what the host agent holds. The same promises over every driver:

an action id acts at most once (I7), code runs in a fresh process with a deadline and capped output, what a driver
captured is a whole PNG of the right size before anybody sees it.
"""

from __future__ import annotations

import asyncio
import hashlib
import ntpath
import shlex
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sandbox_cluster.api import ExecuteReply, ExecuteRequest, Settle, StepRequest
from sandbox_cluster.guest.events import InputEvent, compile_actions
from sandbox_cluster.guest.png import check_png, is_black
from sandbox_cluster.providers.base import DEFAULT_FILE_BYTES, LINUX, Capture, Command, Driver, Platform
from slime_cua.core.errors import SandboxError, UnknownOutcomeError

MAX_KEPT_RESULTS = 64
"""Results kept for repeated action ids. Older ids are remembered without their result and never run again."""
CAPTURE_TIMEOUT_S = 10.0
"""Beyond what a settle may wait. A capture that hangs is tried once more; twice this is less than a step's 30 s."""
SMALL_PX = 300_000
"""A picture of no more pixels is checked faster than it is handed to a thread."""

R = TypeVar("R", Capture, ExecuteReply)


class Desktop:
    """A running desktop in a slot of its provider. All methods raise SandboxError when it is gone."""

    def __init__(
        self,
        driver: Driver,
        provider_name: str,
        slot: int,
        boot_s: float,
        *,
        platform: Platform = LINUX,
        control_url: str = "",
        clock_skew_s: float = 0.0,
        capture_timeout_s: float = CAPTURE_TIMEOUT_S,
    ) -> None:
        self._driver = driver
        self._capture_timeout_s = capture_timeout_s
        self._input_lock = asyncio.Lock()
        self._results: OrderedDict[str, tuple[str, asyncio.Task[Any] | None]] = OrderedDict()
        self.provider_name = provider_name
        self.slot = slot
        self.boot_s = boot_s
        """Seconds from the call of boot() to the first screenshot, waiting for a turn not counted."""
        self.platform = platform
        self.control_url = control_url
        """URL of an OSWorld control server inside; empty: there is none, and guest.server speaks its protocol."""
        self.clock_skew_s = clock_skew_s
        """The desktop's clock less this machine's, when it was handed out."""
        self.num_black_captures = 0
        """Screens that were black twice in a row. A lock screen may be; many of them mean a broken display."""

    @property
    def screen_wh_px(self) -> tuple[int, int]:
        return self._driver.screen_wh_px

    @property
    def is_alive(self) -> bool:
        return self._driver.is_alive

    async def step(self, request: StepRequest) -> Capture:
        """Play the GUI actions, settle, capture. ValueError (nothing played) for an action that cannot be played.

        A known action id returns the first call's result (`is_replay`), waits for it if it still runs, or raises what it
        raised. It goes on to its end when the caller goes away. UnknownOutcomeError: known, but its result is gone.
        """
        events = compile_actions(request.actions, self.screen_wh_px)
        digest = _digest(request.model_dump_json())
        return await self._once(request.action_id, digest, lambda: self.play(events, request.settle))

    async def execute(self, request: ExecuteRequest) -> ExecuteReply:
        """Run a code action in a fresh process; at most once an action id, as step()."""
        command = self._script(
            request.action.language, request.action.code, request.timeout_s, request.max_output_bytes
        )
        digest = _digest(request.model_dump_json())
        return await self._once(request.action_id, digest, lambda: self._driver.run(command))

    async def screenshot(self) -> Capture:
        """The screen as it is now; is_settled is False because nobody waited."""
        return await self.play((), Settle(quiet_ms=0, max_ms=0))

    async def play(self, events: Sequence[InputEvent], settle: Settle) -> Capture:
        """Play input events, settle, capture; one caller at a time. No action id: the caller answers for repeats."""
        async with self._input_lock:
            if events:
                await self._driver.play(events)
            return await self._look(settle)

    async def _look(self, settle: Settle) -> Capture:
        """A whole capture of the right size. One that hangs, is broken or black is taken once more: looking changes nothing."""
        try:
            first = await self._captured(settle)
        except SandboxError:
            return await self._captured(settle)
        if not is_black(first.png, self.screen_wh_px):
            return first
        second = await self._captured(settle)
        self.num_black_captures += is_black(second.png, self.screen_wh_px)
        return second

    async def _captured(self, settle: Settle) -> Capture:
        timeout_s = self._capture_timeout_s + settle.max_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                return await self._checked(await self._driver.capture(settle))
        except TimeoutError:
            raise SandboxError(f"desktop {self.slot}: no screenshot within {timeout_s:g} s") from None

    async def _checked(self, capture: Capture) -> Capture:
        size = (capture.width_px, capture.height_px)
        if size != self.screen_wh_px:
            raise SandboxError(f"desktop {self.slot}: captured {size}, the screen is {self.screen_wh_px}")
        try:
            if size[0] * size[1] <= SMALL_PX:
                check_png(capture.png, size)
            else:
                await asyncio.to_thread(check_png, capture.png, size)
        except ValueError as error:
            raise SandboxError(f"desktop {self.slot}: broken screenshot: {error}") from error
        return capture

    async def run(
        self,
        command: str | Sequence[str],
        is_shell: bool = False,
        timeout_s: float = 120.0,
        max_output_bytes: int = 1 << 20,
        cwd: str = "",
        is_merged: bool = False,
    ) -> ExecuteReply:
        """Run a program in `cwd` (HOME if empty) with OSWorld's reading of `command` (see argv_of). OSError if it cannot be started."""
        return await self._driver.run(
            Command(
                argv=argv_of(command, is_shell, self.platform),
                cwd=cwd or self.platform.home,
                timeout_s=timeout_s,
                max_output_bytes=max_output_bytes,
                is_merged=is_merged,
            )
        )

    async def run_script(
        self, language: str, code: str, timeout_s: float, cwd: str = "", is_merged: bool = False
    ) -> ExecuteReply:
        """Run a "python" or "bash" script in a fresh process. OSError for a cwd that does not work."""
        command = self._script(language, code, timeout_s)
        return await self._driver.run(replace(command, cwd=cwd or self.platform.home, is_merged=is_merged))

    async def launch(self, command: str | Sequence[str], is_shell: bool = False) -> None:
        """Start a program and leave it running. OSError if it cannot be started."""
        argv = argv_of(command, is_shell, self.platform)
        await self._driver.run(Command(argv=argv, cwd=self.platform.home, is_detached=True))

    async def put_file(self, path: str, data: bytes) -> None:
        """Write a file as the desktop's user; `~` is HOME, missing parents are made. OSError as the desktop gave it."""
        await self._driver.put_file(absolute(path, self.platform), data)

    async def get_file(self, path: str, max_bytes: int = DEFAULT_FILE_BYTES) -> bytes:
        """A regular file's bytes. OSError: missing, not regular, no permission, larger than max_bytes."""
        return await self._driver.get_file(absolute(path, self.platform), max_bytes)

    async def connect(self, port: int) -> socket.socket:
        """A connection to a TCP port inside the desktop; the caller closes it. OSError if nobody listens there."""
        return await self._driver.connect(port)

    async def kill(self) -> None:
        """End the desktop and everything in it. May be repeated."""
        await self._driver.kill()

    async def _once(self, action_id: str, digest: str, start: Callable[[], Awaitable[R]]) -> R:
        known = self._results.get(action_id)
        if known is None:
            task = asyncio.ensure_future(start())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._results[action_id] = (digest, task)
            self._forget_old()
            return await asyncio.shield(task)
        first_digest, first = known
        if first_digest != digest:
            raise ValueError(f"action id {action_id!r} was used for another action; take a fresh id")
        if first is None:
            raise UnknownOutcomeError(
                f"action {action_id!r} ran, but its result is no longer kept; not run again"
            )
        result: R = await asyncio.shield(first)
        if isinstance(result, Capture):
            return replace(result, is_replay=True)
        return result.model_copy(update={"is_replay": True})

    def _script(self, language: str, code: str, timeout_s: float, max_output_bytes: int = 1 << 20) -> Command:
        if language not in self.platform.interpreters:
            raise ValueError(
                f"{language} is not there on {self.platform.name} desktops; "
                f"use {' or '.join(self.platform.interpreters)}"
            )
        program, suffix = self.platform.interpreters[language]
        return Command(
            argv=(program,),
            script=code.encode("utf-8", "surrogatepass"),
            script_suffix=suffix,
            cwd=self.platform.home,
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
        )

    def _forget_old(self) -> None:
        kept = [key for key, (_, task) in self._results.items() if task is not None]
        for key in kept[: max(0, len(kept) - MAX_KEPT_RESULTS)]:
            digest, task = self._results[key]
            if task is not None and task.done():
                self._results[key] = (digest, None)


def argv_of(command: str | Sequence[str], is_shell: bool, platform: Platform = LINUX) -> tuple[str, ...]:
    """What OSWorld's server starts for `command`: text is split unless a shell reads it; with a shell, a list's first
    item is the script and the others are $0, $1, ...; `~/` at the head of a list item is HOME. ValueError if empty.
    """
    shell = ["cmd", "/c"] if platform.is_windows else ["/bin/sh", "-c"]
    if isinstance(command, str):
        argv = [*shell, command] if is_shell else shlex.split(command, posix=not platform.is_windows)
    else:
        argv = [platform.home + item[1:] if item.startswith("~/") else item for item in command]
        argv = [*shell, *argv] if is_shell and argv else argv
    if not argv:
        raise ValueError("the command is empty")
    return tuple(argv)


def absolute(path: str, platform: Platform) -> str:
    """`path` with a leading ~ as HOME, relative to HOME otherwise. ValueError for an empty one or one with NUL."""
    if not path or "\0" in path:
        raise ValueError(f"not a path on the desktop: {path!r}")
    if path == "~" or path.startswith("~/"):
        return platform.home + path[1:]
    if platform.is_windows:
        return path if ntpath.splitdrive(path)[0] else ntpath.join(platform.home, path)
    return path if path.startswith("/") else f"{platform.home}/{path}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
