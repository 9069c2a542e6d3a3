"""Desktop: what the host agent holds. The same promises over every driver:

an action id acts at most once (I7), code runs in a fresh process with a deadline and capped output, what a driver
captured is a whole PNG of the right size before anybody sees it.
"""

from __future__ import annotations

import asyncio
import hashlib
import shlex
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sandbox_cluster.api import ExecuteReply, ExecuteRequest, Settle, StepRequest
from sandbox_cluster.guest.events import InputEvent, compile_actions
from sandbox_cluster.guest.png import check_png
from sandbox_cluster.providers.base import DEFAULT_FILE_BYTES, HOME, Capture, Command, Driver
from slime_cua.core.errors import SandboxError, UnknownOutcomeError

MAX_KEPT_RESULTS = 64
"""Results kept for repeated action ids. Older ids are remembered without their result and never run again."""
_INTERPRETERS = {"python": ("/usr/bin/python3", ".py"), "bash": ("/bin/bash", ".sh")}

R = TypeVar("R", Capture, ExecuteReply)


class Desktop:
    """A running desktop in a slot of its provider. All methods raise SandboxError when it is gone."""

    def __init__(self, driver: Driver, provider_name: str, slot: int, boot_s: float) -> None:
        self._driver = driver
        self._input_lock = asyncio.Lock()
        self._results: OrderedDict[str, tuple[str, asyncio.Task[Any] | None]] = OrderedDict()
        self.provider_name = provider_name
        self.slot = slot
        self.boot_s = boot_s
        """Seconds from the call of boot() to the first screenshot, waiting for a turn not counted."""

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
        command = _script(
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
            capture = await self._driver.act(events, settle)
            try:
                return self._checked(capture)
            except SandboxError:
                return self._checked(await self._driver.act((), settle))

    def _checked(self, capture: Capture) -> Capture:
        """`capture` if it is whole and of the right size. A broken one is taken once more: looking changes nothing."""
        size = (capture.width_px, capture.height_px)
        if size != self.screen_wh_px:
            raise SandboxError(f"desktop {self.slot}: captured {size}, the screen is {self.screen_wh_px}")
        try:
            check_png(capture.png, size)
        except ValueError as error:
            raise SandboxError(f"desktop {self.slot}: broken screenshot: {error}") from error
        return capture

    async def run(
        self,
        command: str | Sequence[str],
        is_shell: bool = False,
        timeout_s: float = 120.0,
        max_output_bytes: int = 1 << 20,
        cwd: str = HOME,
        is_merged: bool = False,
    ) -> ExecuteReply:
        """Run a program with OSWorld's reading of `command` (see argv_of). OSError if it cannot be started."""
        return await self._driver.run(
            Command(
                argv=argv_of(command, is_shell),
                cwd=cwd,
                timeout_s=timeout_s,
                max_output_bytes=max_output_bytes,
                is_merged=is_merged,
            )
        )

    async def run_script(
        self, language: str, code: str, timeout_s: float, cwd: str = HOME, is_merged: bool = False
    ) -> ExecuteReply:
        """Run a "python" or "bash" script in a fresh process. OSError for a cwd that does not work."""
        return await self._driver.run(
            replace(_script(language, code, timeout_s), cwd=cwd, is_merged=is_merged)
        )

    async def launch(self, command: str | Sequence[str], is_shell: bool = False) -> None:
        """Start a program and leave it running. OSError if it cannot be started."""
        await self._driver.run(Command(argv=argv_of(command, is_shell), is_detached=True))

    async def put_file(self, path: str, data: bytes) -> None:
        """Write a file as the desktop's user; `~` is HOME, missing parents are made. OSError as the desktop gave it."""
        await self._driver.put_file(_absolute(path), data)

    async def get_file(self, path: str, max_bytes: int = DEFAULT_FILE_BYTES) -> bytes:
        """A regular file's bytes. OSError: missing, not regular, no permission, larger than max_bytes."""
        return await self._driver.get_file(_absolute(path), max_bytes)

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

    def _forget_old(self) -> None:
        kept = [key for key, (_, task) in self._results.items() if task is not None]
        for key in kept[: max(0, len(kept) - MAX_KEPT_RESULTS)]:
            digest, task = self._results[key]
            if task is not None and task.done():
                self._results[key] = (digest, None)


def _script(language: str, code: str, timeout_s: float, max_output_bytes: int = 1 << 20) -> Command:
    interpreter, suffix = _INTERPRETERS[language]
    return Command(
        argv=(interpreter,),
        script=code.encode("utf-8", "surrogatepass"),
        script_suffix=suffix,
        timeout_s=timeout_s,
        max_output_bytes=max_output_bytes,
    )


def argv_of(command: str | Sequence[str], is_shell: bool) -> tuple[str, ...]:
    """What OSWorld's server starts for `command`: text is split unless a shell reads it; with a shell, a list's first
    item is the script and the others are $0, $1, ...; `~/` at the head of a list item is HOME. ValueError if empty.
    """
    if isinstance(command, str):
        argv = ["/bin/sh", "-c", command] if is_shell else shlex.split(command)
    else:
        argv = [HOME + item[1:] if item.startswith("~/") else item for item in command]
        argv = ["/bin/sh", "-c", *argv] if is_shell and argv else argv
    if not argv:
        raise ValueError("the command is empty")
    return tuple(argv)


def _absolute(path: str) -> str:
    """`path` with a leading ~ as HOME, relative to HOME otherwise. ValueError for an empty one or one with NUL."""
    if not path or "\0" in path:
        raise ValueError(f"not a path on the desktop: {path!r}")
    if path == "~" or path.startswith("~/"):
        return HOME + path[1:]
    return path if path.startswith("/") else f"{HOME}/{path}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
