"""What a sandbox provider must do, and what it gives back. Two seams, both small:

    SandboxProvider   makes desktops in numbered slots        (chosen by name in providers/__init__.py)
    Driver            one running desktop, bare: play input, run a program, put and get files, end it

The host agent never calls a Driver: it calls `providers.desktop.Desktop`, which adds to every driver what must be the same
for all of them (at-most-once action ids, code actions, checks on what comes back). A provider's boot() returns a Desktop.
"""

from __future__ import annotations

import base64
import hashlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sandbox_cluster.api import ExecuteReply, Settle, StepReply
from sandbox_cluster.guest.events import InputEvent

if TYPE_CHECKING:
    from sandbox_cluster.providers.desktop import Desktop

HOME = "/home/user"
"""HOME of every Linux desktop, as on OSWorld's machines."""
CDP_PORT, VLC_PORT = 9222, 8080
"""Where Chrome's debugger and VLC's remote control listen inside a desktop, as on OSWorld's machines."""
DEFAULT_FILE_BYTES = 64 << 20
"""What get_file takes at most unless told otherwise."""


@dataclass(frozen=True)
class Capture:
    """A screenshot: lossless PNG of the whole screen, pointer included."""

    png: bytes
    width_px: int
    height_px: int
    time_s: float
    """Unix time of the capture."""
    is_settled: bool
    """False when the screen still changed at the end of the longest wait."""
    is_replay: bool = False
    """True when the action id was known and this is the first call's result."""
    sha256: str = field(default="")

    def __post_init__(self) -> None:
        if not self.sha256:
            object.__setattr__(self, "sha256", hashlib.sha256(self.png).hexdigest())

    def to_reply(self) -> StepReply:
        """The same as a body of the REST contract."""
        return StepReply(
            png_base64=base64.b64encode(self.png).decode(),
            sha256=self.sha256,
            width_px=self.width_px,
            height_px=self.height_px,
            time_s=self.time_s,
            is_settled=self.is_settled,
            is_replay=self.is_replay,
        )


@dataclass(frozen=True)
class Command:
    """A program to run on the desktop, e.g. Command(("ls", "-l"), cwd="/tmp")."""

    argv: tuple[str, ...]
    script: bytes | None = None
    """Written to a fresh file whose path is the last argument; removed when the program ends."""
    script_suffix: str = ""
    cwd: str = HOME
    timeout_s: float = 30.0
    """Then the program and all that it started in its session is killed."""
    max_output_bytes: int = 1 << 20
    """Of stdout and stderr, each; the rest is thrown away and `is_truncated` says so."""
    is_merged: bool = False
    """stderr goes into stdout."""
    is_detached: bool = False
    """Return as soon as it runs; it lives on, its output goes nowhere, no timeout."""


@dataclass(frozen=True)
class Platform:
    """What differs between the systems that desktops run."""

    name: str
    """As in api.Requirements.os."""
    home: str
    interpreters: Mapping[str, tuple[str, str]]
    """Language of a code action -> program, file suffix."""

    @property
    def is_windows(self) -> bool:
        return self.name == "windows"


LINUX = Platform("ubuntu", HOME, {"python": ("/usr/bin/python3", ".py"), "bash": ("/bin/bash", ".sh")})
WINDOWS = Platform("windows", "C:\\Users\\Docker", {"python": ("python", ".py")})
"""As on WindowsAgentArena's machines."""
PLATFORMS = {platform.name: platform for platform in (LINUX, WINDOWS)}


class Driver(Protocol):
    """One running desktop. Every method raises SandboxError when the desktop is gone or does not answer in time.

    Seven methods where five are the rule: playing and looking are apart because a look may be repeated and input may not.
    """

    @property
    def screen_wh_px(self) -> tuple[int, int]: ...

    @property
    def is_alive(self) -> bool:
        """False once the desktop is known to be gone; cheap, no round trip."""
        ...

    async def play(self, events: Sequence[InputEvent]) -> None:
        """Play `events` in order. Never called twice for the same action."""
        ...

    async def capture(self, settle: Settle) -> Capture:
        """Wait until the screen is settled, capture. Changes nothing: may be repeated."""
        ...

    async def run(self, command: Command) -> ExecuteReply:
        """Run a program. OSError (FileNotFoundError, PermissionError...) if it cannot be started."""
        ...

    async def put_file(self, path: str, data: bytes) -> None:
        """Write a file on the desktop as its user; missing parents are made. OSError as the desktop gave it."""
        ...

    async def get_file(self, path: str, max_bytes: int = DEFAULT_FILE_BYTES) -> bytes:
        """A regular file's bytes. OSError: missing, no permission, not a regular file, larger than max_bytes."""
        ...

    async def connect(self, port: int) -> socket.socket:
        """A connection to a TCP port of the desktop's own loopback. OSError (ConnectionRefusedError) if nobody listens."""
        ...

    async def kill(self) -> None:
        """End the desktop and everything in it, at once. May be repeated; raises nothing."""
        ...


class SandboxProvider(Protocol):
    """Makes desktops. Construct with (config: DesktopConfig, state_dir: Path, label: str, max_boots: int)."""

    async def check(self) -> None:
        """PreflightError, with the line to run, when this machine cannot make such desktops."""
        ...

    async def boot(self, slot: int) -> Desktop:
        """A clean desktop in `slot` (0, 1, ...; one desktop a slot at a time). Boots above max_boots wait their turn.

        SandboxError when it is not ready in boot_timeout_s or the slot is taken; nothing of it is left then.
        """
        ...

    async def reap(self) -> int:
        """End what an earlier life with the same label and state_dir left; the number of desktops ended."""
        ...

    async def close(self) -> None:
        """Kill all desktops of this provider and free what it holds. May be repeated."""
        ...
