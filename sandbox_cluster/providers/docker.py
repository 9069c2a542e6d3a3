"""The `docker` provider: a container a desktop, from an image with an OSWorld control server, or with a machine that has one.

Containers carry our label, slot and limits; their ports are published on loopback at numbers that the daemon picks and
tells us. A container is used once: its writable layer, in which the machine's overlay lives, goes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sandbox_cluster.providers.base import CDP_PORT, PLATFORMS, VLC_PORT
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.kvm import PROBE_TIMEOUT_S, fault_of, probe_script
from sandbox_cluster.providers.osworld_driver import OSWorldDriver, make_ready
from sandbox_cluster.providers.osworld_http import ControlServer
from sandbox_cluster.providers.slots import Slots
from sandbox_cluster.serving import event
from slime_cua.config.sandbox import DesktopConfig, MachineConfig
from slime_cua.core.errors import PreflightError, SandboxError

OWNER, SLOT = "slime-cua.owner", "slime-cua.slot"
"""Labels. The owner is the host agent's label, and `state` of its state folder: two hosts of one name do not meet."""
SERVER_PORT = 5000
_PUBLISHED = (SERVER_PORT, CDP_PORT, VLC_PORT)
DAEMON_TIMEOUT_S = 60
MACHINE_OVERHEAD_MB, MACHINE_PROCESSES = 2048, 4096
"""What a container gets beside its machine's memory, and for QEMU's threads."""
R = TypeVar("R")


class DockerProvider:
    """Starts, tracks and removes containers. The SDK blocks, so its calls run in threads."""

    def __init__(self, config: DesktopConfig, state_dir: Path, label: str, max_boots: int = 2) -> None:
        self._config = config
        self._owner = f"{label}@{state_dir.resolve()}"
        self._slots = Slots(max_boots)
        self._client: Any = None
        self._has_kvm: bool | None = None

    async def check(self) -> None:
        await self._call(self._check)

    async def boot(self, slot: int) -> Desktop:
        return await self._slots.boot(slot, lambda: self._boot(slot))

    async def reap(self) -> int:
        return await self._call(self._remove_all)

    async def close(self) -> None:
        await self._slots.kill_all()
        if self._client is not None:
            client, self._client = self._client, None
            await asyncio.to_thread(client.close)

    async def _boot(self, slot: int) -> Desktop:
        started = time.monotonic()
        starting = asyncio.ensure_future(self._call(partial(self._start, slot)))
        try:
            container, ports = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                container, _ = await starting
                await self._call(partial(_remove, container))
            raise
        server = ControlServer(f"http://127.0.0.1:{ports[SERVER_PORT]}", PLATFORMS[self._config.os])
        there = {port: ("127.0.0.1", ports[port]) for port in (CDP_PORT, VLC_PORT)}

        async def end() -> None:
            await self._call(partial(_remove, container))
            self._slots.free(slot)

        driver = OSWorldDriver(server, self._config.screen_wh_px, there, end)
        watching = asyncio.ensure_future(self._fail_early(container, driver))
        try:
            skew_s = await make_ready(driver, self._config.boot_timeout_s, self._config.client_password)
        finally:
            watching.cancel()
        return Desktop(
            driver,
            "docker",
            slot,
            boot_s=time.monotonic() - started,
            platform=server.platform,
            control_url=server.url,
            clock_skew_s=skew_s,
        )

    async def _fail_early(self, container: Any, driver: OSWorldDriver) -> None:
        """While it boots: a container that has ended does not come up any more."""
        while True:
            await asyncio.sleep(1.0)
            with contextlib.suppress(SandboxError):
                await self._call(container.reload)
                if container.status in ("exited", "dead"):
                    said = await self._call(partial(container.logs, tail=5))
                    event(
                        "container_ended", container=container.name, said=said.decode(errors="replace")[-500:]
                    )
                    await driver.kill()
                    return

    # in threads

    async def _call(self, work: Callable[[], R]) -> R:
        try:
            return await asyncio.to_thread(work)
        except _docker_errors() as error:
            raise SandboxError(f"docker: {error}") from error

    def _daemon(self) -> Any:
        if self._client is None:
            docker = _sdk()
            url = self._config.docker.host
            make = docker.DockerClient if url else docker.from_env
            self._client = make(**({"base_url": url} if url else {}), timeout=DAEMON_TIMEOUT_S)
        return self._client

    def _check(self) -> None:
        settings = self._config.docker
        docker = _sdk()
        try:
            self._daemon().ping()
        except (docker.errors.DockerException, OSError) as error:
            raise PreflightError(
                f"no docker daemon answers ({error}): start it, or set sandbox.docker.host to its address"
            ) from None
        try:
            self._daemon().images.get(settings.image)
        except docker.errors.ImageNotFound:
            raise PreflightError(
                f"docker has no image {settings.image}; run: docker pull {settings.image}"
            ) from None
        if self._config.machine.kvm == "auto" and self._has_kvm is None:
            fault = self._kvm_fault()
            self._has_kvm = fault is None
            event("kvm", used=self._has_kvm, reason=fault or "a probe guest booted with it")

    def _kvm_fault(self) -> str | None:
        """Boot the probe guest in a container of the image, with its own qemu."""
        if not Path("/dev/kvm").exists():
            return "there is no /dev/kvm"
        docker = _sdk()
        container = None
        try:
            container = self._daemon().containers.run(
                self._config.docker.image,
                ["-c", probe_script()],
                entrypoint="/bin/sh",
                devices=["/dev/kvm"],
                labels={OWNER: self._owner},
                network_mode="none",
                detach=True,
            )
            code = container.wait(timeout=PROBE_TIMEOUT_S + 10)["StatusCode"]
            return fault_of(code, container.logs(stdout=False).decode(errors="replace"))
        except (docker.errors.DockerException, OSError) as error:
            return f"the probe's container failed: {error}"
        finally:
            if container is not None:
                _remove(container)

    def _start(self, slot: int) -> tuple[Any, dict[int, int]]:
        self._check()
        settings = self._config.docker
        options = limits_of(self._config)
        if self._config.machine.image:
            options |= machine_options(self._config.machine, bool(self._has_kvm))
        if self._has_kvm:
            options["devices"] = ["/dev/kvm"]
        if settings.command:
            options["command"] = list(settings.command)
        container = self._daemon().containers.create(
            settings.image,
            labels={OWNER: self._owner, SLOT: str(slot)},
            ports={f"{port}/tcp": ("127.0.0.1", None) for port in _PUBLISHED},
            **options,
        )
        try:
            container.start()
            container.reload()
            found = container.attrs["NetworkSettings"]["Ports"]
            return container, {port: int(found[f"{port}/tcp"][0]["HostPort"]) for port in _PUBLISHED}
        except (KeyError, TypeError, IndexError):
            said = container.logs(tail=5).decode(errors="replace")
            _remove(container)
            raise SandboxError(f"the container of slot {slot} ended at once: {said[-500:]}") from None
        except BaseException:
            _remove(container)
            raise

    def _remove_all(self) -> int:
        found = self._daemon().containers.list(all=True, filters={"label": f"{OWNER}={self._owner}"})
        for container in found:
            _remove(container)
        return len(found)


def limits_of(config: DesktopConfig) -> dict[str, Any]:
    """Limits of a container, as the SDK's `create` takes them: a desktop's own, or its machine's and room for QEMU."""
    memory_mb, num_cpus, num_processes = config.memory_mb, config.num_cpus, config.num_processes
    if config.machine.image:
        memory_mb = config.machine.memory_mb + MACHINE_OVERHEAD_MB
        num_cpus, num_processes = float(config.machine.num_cpus), MACHINE_PROCESSES
    memory = f"{memory_mb}m"
    return {
        "mem_limit": memory,
        "memswap_limit": memory,
        "nano_cpus": int(num_cpus * 1e9),
        "pids_limit": num_processes,
    }


def machine_options(machine: MachineConfig, has_kvm: bool) -> dict[str, Any]:
    """What OSWorld's image takes to start the machine in it. Source: desktop-env 1.0.2, `providers/docker/provider.py`."""
    whole_gb, rest_mb = divmod(machine.memory_mb, 1024)
    return {
        "volumes": {machine.image: {"bind": "/System.qcow2", "mode": "ro"}},
        "cap_add": ["NET_ADMIN"],
        "environment": {
            "DISK_SIZE": f"{machine.disk_gb}G",
            "RAM_SIZE": f"{machine.memory_mb}M" if rest_mb else f"{whole_gb}G",
            "CPU_CORES": str(machine.num_cpus),
            **({} if has_kvm else {"KVM": "N"}),
        },
    }


def _remove(container: Any) -> None:
    """Kill and remove with its anonymous volumes. One that is gone is fine."""
    with contextlib.suppress(_sdk().errors.NotFound):
        container.remove(force=True, v=True)


def _sdk() -> Any:
    try:
        import docker
    except ImportError:
        raise PreflightError("provider=docker needs Docker's SDK: pip install 'slime-cua[docker]'") from None
    return docker


def _docker_errors() -> tuple[type[Exception], ...]:
    """What the SDK raises when the daemon refuses or does not answer. `requests` comes with the SDK."""
    try:
        from docker.errors import DockerException
        from requests.exceptions import RequestException
    except ImportError:
        return ()
    return (DockerException, RequestException)
