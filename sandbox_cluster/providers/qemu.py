"""The `qemu` provider: a virtual machine a desktop, started here from a qcow2 image that is never written.

Each slot has an overlay. The first desktop of a slot boots cold, and the running machine is kept in the overlay as a snapshot;
later ones start from it, memory and disk alike, in about a second. A machine is used once, ends with this process, and
publishes its ports on loopback at numbers that QEMU picks and tells us.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sandbox_cluster.providers.base import CDP_PORT, PLATFORMS, VLC_PORT
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.kvm import kvm_fault
from sandbox_cluster.providers.osworld_driver import OSWorldDriver, make_ready
from sandbox_cluster.providers.osworld_http import ControlServer
from sandbox_cluster.providers.qmp import Monitor
from sandbox_cluster.providers.records import Records
from sandbox_cluster.providers.slots import Slots
from sandbox_cluster.serving import event
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.errors import PreflightError, SandboxError

SERVER_PORT = 5000
_PUBLISHED = (SERVER_PORT, CDP_PORT, VLC_PORT)
SNAPSHOT = "ready"
SNAPSHOT_TIMEOUT_S = 600.0
KILL_TIMEOUT_S = 10.0
_QEMU, _IMG = "qemu-system-x86_64", "qemu-img"
PACKAGES = "qemu-system-x86 qemu-utils"


class QemuProvider:
    """Boots, tracks and ends virtual machines."""

    def __init__(self, config: DesktopConfig, state_dir: Path, label: str, max_boots: int = 2) -> None:
        self._config = config
        self._folder = state_dir / "disks" / label
        self._records = Records(state_dir, label)
        self._slots = Slots(max_boots)
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="qemu-spawner")
        self._has_snapshot: set[int] = set()
        self._accel = ""

    async def check(self) -> None:
        await asyncio.to_thread(self._check)

    async def boot(self, slot: int) -> Desktop:
        return await self._slots.boot(slot, lambda: self._boot(slot))

    async def reap(self) -> int:
        num_ended = await asyncio.to_thread(self._records.reap)
        await asyncio.to_thread(shutil.rmtree, self._folder, True)
        return num_ended

    async def close(self) -> None:
        await self._slots.kill_all()
        self._records.release()
        await asyncio.to_thread(self._spawner.shutdown)
        await asyncio.to_thread(shutil.rmtree, self._folder, True)
        self._has_snapshot.clear()

    async def _boot(self, slot: int) -> Desktop:
        await self.check()
        started = time.monotonic()
        is_warm = slot in self._has_snapshot
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        spawning = loop.run_in_executor(self._spawner, self._spawn, slot, theirs, is_warm)
        try:
            process = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            ours.close()
            with contextlib.suppress(SandboxError):
                await asyncio.to_thread(self._end, slot, await spawning)
            raise
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            driver, monitor = await self._machine(slot, process, ours)
        except BaseException as error:
            await asyncio.shield(asyncio.to_thread(self._end, slot, process))
            said = _last_words(self._log(slot))
            if isinstance(error, SandboxError | TimeoutError):
                raise SandboxError(f"machine {slot} did not start: {error or 'no answer'} {said}") from error
            raise
        skew_s = await make_ready(driver, self._config.boot_timeout_s, self._config.client_password)
        if not is_warm:
            await self._keep_state(slot, monitor, driver)
        return Desktop(
            driver,
            "qemu",
            slot,
            boot_s=time.monotonic() - started,
            platform=driver.platform,
            control_url=driver.server.url,
            clock_skew_s=skew_s,
        )

    async def _machine(
        self, slot: int, process: subprocess.Popen[bytes], ours: socket.socket
    ) -> tuple[OSWorldDriver, Monitor]:
        """Greet QEMU, hear its ports; the driver ends the machine."""
        monitor = await Monitor.open(ours, self._config.boot_timeout_s)
        try:
            ports = await monitor.published(_PUBLISHED)
        except BaseException:
            monitor.close()
            raise
        server = ControlServer(f"http://127.0.0.1:{ports[SERVER_PORT]}", PLATFORMS[self._config.os])

        async def end() -> None:
            monitor.close()
            await asyncio.to_thread(self._end, slot, process)
            self._slots.free(slot)

        there = {port: ("127.0.0.1", ports[port]) for port in (CDP_PORT, VLC_PORT)}
        driver = OSWorldDriver(
            server, self._config.screen_wh_px, there, end, is_there=lambda: process.poll() is None
        )
        return driver, monitor

    async def _keep_state(self, slot: int, monitor: Monitor, driver: OSWorldDriver) -> None:
        """Keep the running machine in its overlay. When that fails the next desktop boots cold, as this one did."""
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                await monitor.human(f"savevm {SNAPSHOT}")
            self._has_snapshot.add(slot)
        except (SandboxError, TimeoutError) as error:
            event("snapshot_failed", slot=slot, error=str(error))
        except BaseException:
            await asyncio.shield(driver.kill())
            raise

    # on the spawner thread and in threads

    def _check(self) -> None:
        for program in (_QEMU, _IMG, "setpriv"):
            if shutil.which(program) is None:
                raise PreflightError(
                    f"provider=qemu needs {program}; as root: apt-get install -y --no-install-recommends "
                    f"{'util-linux' if program == 'setpriv' else PACKAGES}"
                )
        image = self._config.machine.image
        if not image or not Path(image).is_file():
            raise PreflightError(
                f"sandbox.machine.image={image!r} is no file; set it to a qcow2 image that starts an OSWorld control "
                f"server at port {SERVER_PORT}"
            )
        if not self._accel:
            fault = "off by config" if self._config.machine.kvm == "off" else kvm_fault()
            self._accel = "kvm" if fault is None else "tcg"
            event("kvm", used=fault is None, reason=fault or "a probe guest booted with it")

    def _spawn(self, slot: int, monitor: socket.socket, is_warm: bool) -> subprocess.Popen[bytes]:
        """Start QEMU on the one long-lived thread: the kernel ends it when the *thread* that started it ends."""
        try:
            self._records.own()
            disk = self._disk(slot)
            if not is_warm:
                self._make_overlay(disk)
            with self._log(slot).open("wb") as log:
                process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *self._line(disk, monitor.fileno(), is_warm)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(monitor.fileno(),),
                    start_new_session=True,
                    cwd="/",
                )
            self._records.write(slot, process.pid, ())
            return process
        except OSError as error:
            raise SandboxError(f"machine {slot} could not be started: {error}") from error

    def _make_overlay(self, disk: Path) -> None:
        disk.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        disk.unlink(missing_ok=True)
        image = Path(self._config.machine.image).resolve()
        line = [_IMG, "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", str(image), str(disk)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SandboxError(f"no overlay over {image}: {done.stderr.strip()[-300:]}")

    def _line(self, disk: Path, monitor: int, is_warm: bool) -> list[str]:
        settings, machine = self._config.qemu, self._config.machine
        forwards = ",".join(f"hostfwd=tcp:127.0.0.1:0-:{port}" for port in _PUBLISHED)
        return [
            _QEMU,
            *("-accel", self._accel, "-cpu", "host" if self._accel == "kvm" else "max"),
            *("-m", str(machine.memory_mb), "-smp", str(machine.num_cpus)),
            *("-display", "none", "-vga", "std", "-no-reboot", "-nodefaults"),
            *(
                "-drive",
                f"file={_escaped(disk)},format=qcow2,if={settings.disk_bus},cache=unsafe,discard=unmap",
            ),
            *("-netdev", f"user,id=net,restrict={'off' if settings.is_online else 'on'},{forwards}"),
            *("-device", f"{'virtio-net-pci' if settings.disk_bus == 'virtio' else 'e1000'},netdev=net"),
            *("-chardev", f"socket,id=qmp,fd={monitor}", "-mon", "chardev=qmp,mode=control"),
            *("-rtc", "base=utc", "-usb", "-device", "usb-tablet"),
            *settings.arguments,
            *(("-loadvm", SNAPSHOT) if is_warm else ()),
        ]

    def _end(self, slot: int, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_TIMEOUT_S)
        self._records.remove(slot)
        if slot not in self._has_snapshot:
            self._disk(slot).unlink(missing_ok=True)

    def _disk(self, slot: int) -> Path:
        return self._folder / f"slot-{slot}.qcow2"

    def _log(self, slot: int) -> Path:
        return self._folder / f"slot-{slot}.log"


def _escaped(path: Path) -> str:
    """QEMU doubles commas in option values."""
    return os.fspath(path).replace(",", ",,")


def _last_words(log: Path) -> str:
    with contextlib.suppress(OSError):
        return f"({log.read_text(errors='replace').strip()[-400:]})"
    return ""
