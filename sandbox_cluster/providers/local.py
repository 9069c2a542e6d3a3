"""The `local` provider: desktops in bubblewrap sandboxes on this machine, with a private X display each. Linux only.

Weak isolation: the kernel is shared. Namespaces, no capabilities, a system call denylist, a host user per slot (as root)
and limits keep an ordinary program in; an exploit of the kernel gets out. docs/desktops.md has what is and is not kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import sandbox_cluster.guest as guest_package
from sandbox_cluster.api import Settle
from sandbox_cluster.guest.home import home_files
from sandbox_cluster.guest.link import AgentLink
from sandbox_cluster.providers import limits
from sandbox_cluster.providers.bubblewrap import AGENT_PATH, MODULES_PATH, DataFiles, arguments
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.local_driver import LocalDriver, Workers
from sandbox_cluster.providers.preflight import check_machine
from sandbox_cluster.providers.records import Records
from sandbox_cluster.providers.seccomp import denylist_program
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
        self._boots = asyncio.Semaphore(max_boots)
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="sandbox-spawner")
        self._workers = Workers()
        self._slots: dict[int, Desktop | None] = {}
        self._backend: limits.Backend | None = None
        guest = Path(guest_package.__file__).parent
        self._own = {
            AGENT_PATH: (guest / "agent.py").read_bytes(),
            f"{MODULES_PATH}/pyautogui.py": (guest / "pyautogui_inside.py").read_bytes(),
        }

    async def check(self) -> None:
        await asyncio.to_thread(check_machine, self._config)
        await asyncio.to_thread(home_files, self._config)

    async def boot(self, slot: int) -> Desktop:
        if self._slots.get(slot, None) is not None or slot in self._slots:
            raise SandboxError(f"slot {slot} has a desktop; kill it first")
        self._slots[slot] = None
        try:
            async with self._boots:
                desktop = await self._boot(slot)
        except BaseException:
            self._slots.pop(slot, None)
            raise
        self._slots[slot] = desktop
        return desktop

    async def reap(self) -> int:
        num_ended = await asyncio.to_thread(self._records.reap)
        await asyncio.to_thread(lambda: limits.sweep(limits.find_backend()))
        return num_ended

    async def close(self) -> None:
        desktops = [desktop for desktop in self._slots.values() if desktop is not None]
        await asyncio.gather(*(desktop.kill() for desktop in desktops))
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
                await driver.act((), Settle(quiet_ms=0, max_ms=0))
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
        self._records.own()
        backend = self._backend = self._backend or limits.find_backend()
        user = _slot_user(self._config.first_uid + slot) if os.getuid() == 0 else None
        groups = limits.make_groups(backend, f"{self._label}-{slot}", self._config)
        data = DataFiles()
        gate_out, gate_in = os.pipe()
        try:
            options = arguments(self._config, self._own, denylist_program(), data)
            line = data.add(b"\0".join(option.encode() for option in options) + b"\0")
            limiter = limits.process_limits(self._config, backend, is_own_user=user is not None)
            agent = ["/usr/bin/python3", "-I", "-S", AGENT_PATH, str(control.fileno())]
            gate = ["/bin/sh", "-c", _GATE, "gate"]
            log = os.memfd_create("log", os.MFD_CLOEXEC)
            process = subprocess.Popen(
                [*gate, *limiter, _bwrap(), "--args", str(line), "--", *agent],
                stdin=gate_out,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(control.fileno(), *data.files),
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
            sandbox = Sandbox(slot, process, groups, log)
            try:
                self._records.write(slot, process.pid, groups)
                limits.join(groups, process.pid)
                os.write(gate_in, b"go\n")
            except BaseException:
                self._clean(sandbox)
                raise
            return sandbox
        except (OSError, PreflightError) as error:
            limits.remove_groups(groups)
            raise SandboxError(f"desktop {slot} could not be started: {error}") from error
        finally:
            data.close()
            os.close(gate_out)
            os.close(gate_in)

    async def _end(self, sandbox: Sandbox) -> None:
        """End a sandbox and all that belongs to it; its slot is free then. May be repeated."""
        async with sandbox.ending:
            if sandbox.log >= 0:
                await asyncio.to_thread(self._clean, sandbox)
                self._slots.pop(sandbox.slot, None)

    def _clean(self, sandbox: Sandbox) -> None:
        process = sandbox.process
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_TIMEOUT_S)
        limits.remove_groups(sandbox.groups)
        self._records.remove(sandbox.slot)
        os.close(sandbox.log)
        sandbox.log = -1


def _slot_user(uid: int) -> int:
    """`uid`, when no account of this machine has it. SandboxError otherwise."""
    with contextlib.suppress(KeyError):
        name = pwd.getpwuid(uid).pw_name
        raise SandboxError(f"host user {uid} is {name}'s; set first_uid to a range that nobody has")
    return uid


def _bwrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxError(
            "bubblewrap is missing; as root: apt-get install -y --no-install-recommends bubblewrap"
        )
    return path
