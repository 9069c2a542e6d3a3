"""A desktop behind an OSWorld control server: driver of the providers `remote`, `docker` and `qemu`.

Input goes as pyautogui calls by /execute, programs by guest/supervise.py (deadline, caps, whole tree killed), looks by
/screenshot. Nothing that may have acted is sent again.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from PIL import Image

from sandbox_cluster.api import ExecuteReply, Settle
from sandbox_cluster.guest.events import InputEvent, Pause, parted
from sandbox_cluster.guest.pyautogui_text import program_text
from sandbox_cluster.providers.base import DEFAULT_FILE_BYTES, Capture, Command, Platform
from sandbox_cluster.providers.osworld_http import CALL_S, PATIENCE_S, ControlServer
from slime_cua.core.errors import SandboxError, UnknownOutcomeError

MIN_POLL_S = 0.05
READY_POLL_S = 0.25
LOOK_TIMEOUT_S = 10.0
MAX_SKEW_S = 1.0
MAX_PICTURE_PX = 8192 * 8192
"""The largest screen there may be: a program of the policy's can be what answers on a machine."""


class OSWorldDriver:
    """`ports`: port inside -> (address, port) here. `end` takes the desktop down; `is_there` says without delay if it runs."""

    def __init__(
        self,
        server: ControlServer,
        screen_wh_px: tuple[int, int],
        ports: Mapping[int, tuple[str, int]],
        end: Callable[[], Awaitable[None]],
        is_there: Callable[[], bool] = lambda: True,
    ) -> None:
        self.server = server
        self._screen_wh_px = screen_wh_px
        self._ports = ports
        self._end = end
        self._is_there = is_there
        self._is_ended = False

    @property
    def screen_wh_px(self) -> tuple[int, int]:
        return self._screen_wh_px

    @property
    def platform(self) -> Platform:
        return self.server.platform

    @property
    def is_alive(self) -> bool:
        return not self._is_ended and self._is_there()

    async def ready(self, password: str) -> float:
        """Wait (without end: the caller has the deadline) until it answers, and set its clock if that is off. The skew left, in
        seconds.

        SandboxError: the screen has another size, the clock cannot be set, or the desktop is gone.
        """
        while True:
            self._still_alive()
            try:
                if self.platform.is_windows and (await self.server.call("GET", "/probe")).status != 200:
                    raise SandboxError("not ready")
                await self._picture()
                size = await self.server.screen_wh_px()
                low, high = await self.server.clock_skew_s()
                break
            except SandboxError:
                await asyncio.sleep(READY_POLL_S)
        if size != self._screen_wh_px:
            raise SandboxError(
                f"the machine at {self.server.url} has a screen of {size[0]}x{size[1]}: "
                f"set sandbox.screen_wh_px to [{size[0]}, {size[1]}]"
            )
        skew_s = _least((low, high))
        return skew_s if abs(skew_s) <= MAX_SKEW_S else await self.set_clock((low + high) / 2, password)

    async def set_clock(self, skew_s: float, password: str) -> float:
        """Step the desktop's clock by -skew_s; the skew that is left. SandboxError when more than MAX_SKEW_S."""
        request = {"op": "step_time", "seconds": -skew_s, "password": password}
        answer = await self.server.supervised(request)
        left_s = _least(await self.server.clock_skew_s())
        if abs(left_s) > MAX_SKEW_S:
            raise SandboxError(
                f"the clock of {self.server.url} is {left_s:+.1f} s off and cannot be set: {answer.get('said')}"
            )
        return left_s

    async def play(self, events: Sequence[InputEvent]) -> None:
        for part in parted(events):
            self._still_alive()
            if isinstance(part, Pause):
                await asyncio.sleep(part.seconds)
                continue
            reply = await self.server.execute(
                ["python", "-c", program_text(part, self.platform.is_windows)], 2 * PATIENCE_S
            )
            if reply.get("returncode") != 0:
                raise SandboxError(f"input could not be played: {str(reply.get('error'))[-500:]}")

    async def capture(self, settle: Settle) -> Capture:
        self._still_alive()
        started = changed = time.monotonic()
        picture = await self._picture()
        quiet_s, max_s = settle.quiet_ms / 1000, settle.max_ms / 1000
        is_settled = False
        while max_s > 0:
            now = time.monotonic()
            is_settled = now - changed >= quiet_s
            if is_settled or now - started >= max_s:
                break
            await asyncio.sleep(max(MIN_POLL_S, min(quiet_s / 2, started + max_s - now)))
            seen = time.monotonic()
            later = await self._picture()
            if _digest(later) != _digest(picture):
                changed = seen
            picture = later
        return Capture(picture, *self._screen_wh_px, time_s=time.time(), is_settled=is_settled)

    async def run(self, command: Command) -> ExecuteReply:
        self._still_alive()
        request = {
            "op": "run",
            "argv": list(command.argv),
            "cwd": command.cwd,
            "timeout": command.timeout_s,
            "cap": command.max_output_bytes,
            "merged": command.is_merged,
            "detached": command.is_detached,
            "script": None if command.script is None else base64.b64encode(command.script).decode(),
            "suffix": command.script_suffix,
            "patience": PATIENCE_S if command.timeout_s > PATIENCE_S and not command.is_detached else 0,
        }
        wait_s = CALL_S + min(command.timeout_s, PATIENCE_S)
        answer = await self.server.supervised(request, wait_s)
        while "pending" in answer:
            self._still_alive()
            waiting = {"op": "wait", "place": answer["pending"], "patience": PATIENCE_S}
            answer = await self.server.supervised(waiting, wait_s)
        outputs = [base64.b64decode(part).decode(errors="replace") for part in answer.get("outputs", ())]
        stdout, stderr = (*outputs, "", "")[:2]
        return ExecuteReply(
            stdout=stdout,
            stderr=stderr,
            returncode=answer.get("rc"),
            is_timeout=bool(answer.get("timeout")),
            is_truncated=bool(answer.get("cut")),
        )

    async def put_file(self, path: str, data: bytes) -> None:
        self._still_alive()
        await self.server.supervised({"op": "place", "path": path})
        await self.server.upload(path, data)

    async def get_file(self, path: str, max_bytes: int = DEFAULT_FILE_BYTES) -> bytes:
        self._still_alive()
        size = int((await self.server.supervised({"op": "look", "path": path}))["size"])
        if size > max_bytes:
            raise OSError(27, f"file has {size} bytes, more than {max_bytes}", path)
        data = await self.server.download(path)
        if len(data) > max_bytes:
            raise OSError(27, f"file has {len(data)} bytes, more than {max_bytes}", path)
        return data

    async def connect(self, port: int) -> socket.socket:
        self._still_alive()
        if port not in self._ports:
            raise ConnectionRefusedError(111, f"port {port} of this desktop is not reachable from here")
        connection = socket.socket()
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, self._ports[port])
        except BaseException:
            connection.close()
            raise
        return connection

    async def kill(self) -> None:
        self._is_ended = True
        await self._end()
        await self.server.close()

    async def _picture(self) -> bytes:
        """A lossless PNG. A JPEG is refused: what a policy sees must not depend on a server's encoder."""
        picture = await self.server.screenshot(LOOK_TIMEOUT_S)
        try:
            with Image.open(io.BytesIO(picture)) as image:
                width, height = image.size
                if width * height > MAX_PICTURE_PX:
                    raise SandboxError(
                        f"{self.server.url} sends a picture of {width}x{height}: nothing of it was read"
                    )
                if image.format == "PNG":
                    await asyncio.to_thread(image.load)
                    return picture
                found = image.format
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise SandboxError(f"{self.server.url} sent a broken screenshot: {error}") from None
        raise SandboxError(f"{self.server.url} sends {found} screenshots, not PNG")

    def _still_alive(self) -> None:
        if not self.is_alive:
            raise SandboxError("the desktop is gone")


def _least(bounds: tuple[float, float]) -> float:
    """The smallest skew within the bounds."""
    low, high = bounds
    return max(low, 0.0) or min(high, 0.0)


def _digest(picture: bytes) -> str:
    return hashlib.sha256(picture).hexdigest()


async def make_ready(driver: OSWorldDriver, timeout_s: float, password: str) -> float:
    """The driver's desktop answers and its clock is right; the skew that is left. It is killed when that fails.

    Raises SandboxError with what is wrong.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await driver.ready(password)
    except BaseException as error:
        await asyncio.shield(driver.kill())
        if isinstance(error, TimeoutError):
            raise SandboxError(
                f"{driver.server.url} was not ready in {timeout_s:g} s; raise boot_timeout_s or look at that machine"
            ) from None
        if isinstance(error, OSError | UnknownOutcomeError):
            raise SandboxError(f"{driver.server.url} failed while it started: {error}") from error
        raise
