"""What is particular to containers and virtual machines that we start: limits, ports, snapshots, and what a crash leaves."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox_cluster.providers.docker import OWNER, SLOT, DockerProvider
from sandbox_cluster.providers.qemu import QemuProvider
from slime_cua.config.sandbox import DesktopConfig, DockerConfig, MachineConfig
from slime_cua.core.errors import PreflightError, SandboxError
from tests.contract.provider_rigs import Daemon, docker_is_missing


def containers(daemon: Daemon) -> list[Any]:
    import docker

    client = docker.DockerClient(base_url=daemon.url)
    try:
        return [container.attrs for container in client.containers.list(all=True)]
    finally:
        client.close()


@pytest.mark.docker
async def test_a_container_has_its_owner_its_limits_and_ports_on_loopback_only(
    daemon: Daemon, tmp_path: Path
) -> None:
    provider = DockerProvider(daemon.config(), tmp_path, "host-1")
    try:
        await provider.boot(3)
        [found] = containers(daemon)
        labels, limits = found["Config"]["Labels"], found["HostConfig"]
        assert labels[SLOT] == "3" and labels[OWNER] == owner_of("host-1", tmp_path)
        assert (limits["Memory"], limits["NanoCpus"], limits["PidsLimit"]) == (256 << 20, 10**9, 128)
        published = [one for ports in found["NetworkSettings"]["Ports"].values() for one in ports]
        assert len(published) == 3 and {one["HostIp"] for one in published} == {"127.0.0.1"}
    finally:
        await provider.close()
    assert containers(daemon) == []


@pytest.mark.docker
async def test_a_container_around_a_machine_has_its_disk_read_only_and_room_for_it(
    daemon: Daemon, tmp_path: Path
) -> None:
    disk = tmp_path / "Ubuntu.qcow2"
    disk.write_bytes(b"disk")
    machine = MachineConfig(image=str(disk), memory_mb=1024, num_cpus=2, disk_gb=9, kvm="off")
    provider = DockerProvider(daemon.config().model_copy(update={"machine": machine}), tmp_path, "host-1")
    try:
        desktop = await provider.boot(0)
        seen = await desktop.run("cat /System.qcow2; echo more >> /System.qcow2; env", is_shell=True)
        assert seen.stdout.startswith("disk") and "Read-only" in seen.stderr
        inside = dict(line.split("=", 1) for line in seen.stdout[4:].splitlines() if "=" in line)
        wanted = {"RAM_SIZE": "1G", "CPU_CORES": "2", "DISK_SIZE": "9G", "KVM": "N"}
        assert {name: inside.get(name) for name in wanted} == wanted
        [found] = containers(daemon)
        assert found["HostConfig"]["Memory"] == 3 << 30 and found["HostConfig"]["NanoCpus"] == 2 * 10**9
    finally:
        await provider.close()


@pytest.mark.docker
async def test_the_next_life_removes_what_carries_its_label_and_leaves_neighbours_alone(
    daemon: Daemon, tmp_path: Path
) -> None:
    dead, neighbour, next_life = (
        DockerProvider(daemon.config(), tmp_path, label) for label in ("host-1", "host-2", "host-1")
    )
    try:
        await dead.boot(0)
        alive = await neighbour.boot(0)
        assert await next_life.reap() == 1
        assert (await alive.screenshot()).png
        assert [one["Config"]["Labels"][OWNER].split("@")[0] for one in containers(daemon)] == ["host-2"]
    finally:
        for provider in (dead, neighbour, next_life):
            await provider.close()


@pytest.mark.docker
async def test_a_container_that_ends_at_once_is_a_failed_boot_and_leaves_nothing(
    daemon: Daemon, tmp_path: Path
) -> None:
    settings = daemon.config().docker.model_copy(update={"command": ("/usr/bin/false_start",)})
    config = daemon.config().model_copy(update={"docker": settings, "boot_timeout_s": 20})
    provider = DockerProvider(config, tmp_path, "host-1")
    with pytest.raises(SandboxError):
        await provider.boot(0)
    await provider.close()
    assert containers(daemon) == []


async def test_a_missing_daemon_is_a_sentence(tmp_path: Path) -> None:
    docker_is_missing()  # puts the SDK on the path where it lies beside .venv
    if importlib.util.find_spec("docker") is None:
        with pytest.raises(PreflightError, match=r"pip install 'slime-cua\[docker\]'"):
            await DockerProvider(DesktopConfig(), tmp_path, "x").check()
        return
    config = DesktopConfig(docker=DockerConfig(host=f"unix://{tmp_path}/none"))
    with pytest.raises(PreflightError, match=r"set sandbox\.docker\.host"):
        await DockerProvider(config, tmp_path, "x").check()


@pytest.mark.docker
async def test_a_missing_image_is_a_sentence_with_the_line_to_run(daemon: Daemon, tmp_path: Path) -> None:
    config = DesktopConfig(docker=DockerConfig(host=daemon.url, image="none:1"))
    with pytest.raises(PreflightError, match="docker pull none:1"):
        await DockerProvider(config, tmp_path, "x").check()


async def test_a_missing_disk_or_program_of_qemu_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DesktopConfig(machine=MachineConfig(image="/none.qcow2"))
    with pytest.raises(PreflightError, match=r"image='/none\.qcow2' is no file|apt-get install"):
        await QemuProvider(config, tmp_path, "x").check()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreflightError, match="needs qemu-system-x86_64; as root: apt-get install"):
        await QemuProvider(config, tmp_path, "x").check()


@pytest.mark.vm
@pytest.mark.timeout(1200)
async def test_the_image_is_never_written_and_ports_are_on_loopback_only(
    machine: DesktopConfig, tmp_path: Path
) -> None:
    before = await asyncio.to_thread(digest, machine.machine.image)
    provider = QemuProvider(machine, tmp_path, "host-1")
    try:
        desktop = await provider.boot(0)
        await desktop.put_file("/srv/mark", b"x" * 100_000)
        [qemu] = machines()
        listening = [one.laddr.ip for one in qemu.net_connections("tcp") if one.status == "LISTEN"]
        assert listening == ["127.0.0.1"] * 3
    finally:
        await provider.close()
    assert machines() == [] and await asyncio.to_thread(digest, machine.machine.image) == before
    assert disks(tmp_path) == []


OWNER_PROGRAM = """
import asyncio, sys
from pathlib import Path
from sandbox_cluster.providers.qemu import QemuProvider
from slime_cua.config.sandbox import DesktopConfig
async def main():
    provider = QemuProvider(DesktopConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]), "host-1")
    asyncio.ensure_future(provider.boot(0))
    while not list(Path(sys.argv[2]).rglob("slot-0.json")):
        await asyncio.sleep(0.1)
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.vm
async def test_a_machine_dies_with_a_host_that_is_killed_and_its_disk_goes_with_the_next_life(
    machine: DesktopConfig, tmp_path: Path
) -> None:
    line = [sys.executable, "-c", textwrap.dedent(OWNER_PROGRAM), machine.model_dump_json(), str(tmp_path)]
    owner = await asyncio.to_thread(lambda: subprocess.Popen(line, stdout=subprocess.PIPE))
    assert owner.stdout
    assert await asyncio.to_thread(owner.stdout.readline) == b"up\n"
    assert len(machines()) == 1
    owner.send_signal(signal.SIGKILL)
    await asyncio.to_thread(owner.wait)
    for _ in range(200):
        if not machines():
            break
        await asyncio.sleep(0.05)
    assert machines() == []
    provider = QemuProvider(machine, tmp_path, "host-1")
    await provider.reap()
    assert disks(tmp_path) == []
    await provider.close()


def machines() -> list[psutil.Process]:
    """Virtual machines that descend from this process or were orphaned with one of its overlays."""
    found = []
    for one in psutil.process_iter(["name", "cmdline", "status"]):
        words = one.info["cmdline"] or []
        if one.info["name"].startswith("qemu-system") and one.info["status"] != psutil.STATUS_ZOMBIE:
            found += [one] if any("/disks/host-1/" in word for word in words) else []
    return found


def owner_of(label: str, state: Path) -> str:
    return f"{label}@{os.path.realpath(state)}"


def disks(folder: Path) -> list[Path]:
    return list(folder.rglob("*.qcow2"))


def digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
