"""The `local` provider: desktops in bubblewrap sandboxes on this machine, with a private X display each. Linux only.

Weak isolation: the kernel is shared. Namespaces, no capabilities, a system call denylist, a host user per slot (as root)
and limits keep an ordinary program in; an exploit of the kernel gets out. docs/desktops.md has what is and is not kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import sandbox_cluster.guest as guest_package
from sandbox_cluster.api import Settle
from sandbox_cluster.guest.home import home_files
from sandbox_cluster.guest.link import AgentLink
from sandbox_cluster.providers import limits
from sandbox_cluster.providers.bubblewrap import (
    AGENT_PATH,
    CHROME,
    CHROME_PATH,
    MODULES_PATH,
    DataFiles,
    arguments,
    program,
)
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.local_driver import LocalDriver, Workers
from sandbox_cluster.providers.marks import marked
from sandbox_cluster.providers.preflight import check_machine
from sandbox_cluster.providers.records import Records
from sandbox_cluster.providers.seccomp import denylist_program
from sandbox_cluster.providers.slots import Slots
from sandbox_cluster.providers.users import UserClaim, claim_user
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.errors import PreflightError, SandboxError

KILL_TIMEOUT_S = 10.0
_GATE = 'read -r go || exit 1; exec "$@" </dev/null'
"""The sandbox process waits here until it is in its groups; when the owner dies first, it ends."""


@dataclass
class Sandbox:
    """The outermost process of a desktop and its groups."""

    slot: int
    process: subprocess.Popen[bytes]
    groups: tuple[Path, ...]
    log: int
    """What bubblewrap and the agent complained about: a memory file; -1 when all is cleaned up."""
    claim: UserClaim | None
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def complaint(self) -> str:
        """The end of the log, for an error message."""
        size = os.fstat(self.log).st_size
        text = os.pread(self.log, 500, max(0, size - 500)).decode(errors="replace").strip()
        return f" ({text})" if text else ""


class LocalProvider:
    """Boots, tracks and ends local desktops. Use it from one event loop."""

    def __init__(self, config: DesktopConfig, state_dir: Path, label: str, max_boots: int = 2) -> None:
        self._config = config
        self._label = label
        self._records = Records(state_dir, label)
        self._slots = Slots(max_boots)
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="sandbox-spawner")
        self._workers = Workers()
        self._backend: limits.Backend | None = None
        guest = Path(guest_package.__file__).parent
        self._own = {
            AGENT_PATH: (guest / "agent.py").read_bytes(),
            f"{MODULES_PATH}/pyautogui.py": (guest / "pyautogui_inside.py").read_bytes(),
            CHROME_PATH: CHROME,
        }

    async def check(self) -> None:
        await asyncio.to_thread(check_machine, self._config)
        await asyncio.to_thread(home_files, self._config)

    async def boot(self, slot: int) -> Desktop:
        return await self._slots.boot(slot, lambda: self._boot(slot))

    async def reap(self) -> int:
        num_ended = await asyncio.to_thread(self._records.reap)
        await asyncio.to_thread(lambda: limits.sweep(limits.find_backend()))
        return num_ended

    async def close(self) -> None:
        await self._slots.kill_all()
        self._records.release()
        await asyncio.to_thread(self._spawner.shutdown)
        self._workers.close()

    async def _boot(self, slot: int) -> Desktop:
        started = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                loop = asyncio.get_running_loop()
                spawning = loop.run_in_executor(self._spawner, self._spawn, slot, theirs)
                sandbox = await asyncio.shield(spawning)
            except asyncio.CancelledError:
                ours.close()
                await self._end(await spawning)
                raise
            except BaseException:
                ours.close()
                raise
        link = AgentLink(ours)
        driver = LocalDriver(self._config, link, self._workers, partial(self._end, sandbox))
        try:
            async with asyncio.timeout(self._config.boot_timeout_s):
                await driver.start()
                await driver.capture(Settle(quiet_ms=0, max_ms=0))
        except BaseException as error:
            complaint = sandbox.complaint()
            await asyncio.shield(driver.kill())
            if isinstance(error, TimeoutError):
                raise SandboxError(
                    f"desktop {slot} was not ready in {self._config.boot_timeout_s:g} s{complaint}; "
                    "raise boot_timeout_s or lower max_boots"
                ) from None
            if isinstance(error, OSError | SandboxError):
                raise SandboxError(f"desktop {slot} did not boot: {error}{complaint}") from error
            raise
        return Desktop(driver, "local", slot, boot_s=time.monotonic() - started)

    def _spawn(self, slot: int, control: socket.socket) -> Sandbox:
        """Start the sandbox. On the one long-lived spawner thread: the kernel ends a sandbox when the *thread* that
        started it ends (PR_SET_PDEATHSIG)."""
        try:
            with contextlib.ExitStack() as undo:
                sandbox = self._spawn_undone_by(undo, slot, control)
                undo.pop_all()
                return sandbox
        except (OSError, PreflightError) as error:
            raise SandboxError(f"desktop {slot} could not be started: {error}") from error

    def _spawn_undone_by(self, undo: contextlib.ExitStack, slot: int, control: socket.socket) -> Sandbox:
        self._records.own()
        backend = self._backend = self._backend or limits.find_backend()
        claim = claim_user(self._config.first_uid + slot) if os.getuid() == 0 else None
        if claim is not None:
            undo.callback(claim.release)
        groups = limits.make_groups(backend, f"{self._label}-{slot}-{uuid.uuid4().hex[:8]}", self._config)
        undo.callback(limits.remove_groups, groups)
        log = os.memfd_create("log", os.MFD_CLOEXEC)
        undo.callback(os.close, log)
        with contextlib.closing(DataFiles()) as data, _pipe() as (gate_out, gate_in):
            process = self._popen(control, data, gate_out, log, backend, claim)
            undo.callback(_kill, process)
            self._records.write(slot, process.pid, groups)
            undo.callback(self._records.remove, slot)
            limits.join(groups, process.pid)
            os.write(gate_in, b"go\n")
        return Sandbox(slot, process, groups, log, claim)

    def _popen(
        self,
        control: socket.socket,
        data: DataFiles,
        gate: int,
        log: int,
        backend: limits.Backend,
        claim: UserClaim | None,
    ) -> subprocess.Popen[bytes]:
        """The sandbox process, waiting at its gate."""
        options = arguments(self._config, self._own, data)
        line = data.add(b"\0".join(option.encode() for option in options) + b"\0")
        limiter = limits.process_limits(self._config, backend, is_own_user=claim is not None)
        inside = program(self._config, control.fileno(), denylist_program(), data)
        command = ["/bin/sh", "-c", _GATE, "gate", *limiter, _bwrap(), "--args", str(line), "--", *inside]
        return subprocess.Popen(
            command,
            stdin=gate,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(control.fileno(), *data.files),
            cwd="/",
            env=marked({"PATH": "/usr/bin:/bin"}),
            start_new_session=True,
            user=None if claim is None else claim.uid,
            group=None if claim is None else claim.uid,
            extra_groups=None if claim is None else [],
        )

    async def _end(self, sandbox: Sandbox) -> None:
        """End a sandbox and all that belongs to it; its slot is free then. May be repeated."""
        async with sandbox.ending:
            if sandbox.log >= 0:
                await asyncio.to_thread(self._clean, sandbox)
                self._slots.free(sandbox.slot)

    def _clean(self, sandbox: Sandbox) -> None:
        _kill(sandbox.process)
        limits.remove_groups(sandbox.groups)
        self._records.remove(sandbox.slot)
        if sandbox.claim is not None:
            sandbox.claim.release()
        os.close(sandbox.log)
        sandbox.log = -1


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        # The group, not the outer process alone: until all is mounted the inner one does not die with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_TIMEOUT_S)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def _bwrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        raise PreflightError(
            "bubblewrap is missing; as root: apt-get install -y --no-install-recommends bubblewrap"
        )
    return path
