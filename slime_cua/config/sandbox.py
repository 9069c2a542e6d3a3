"""Sandbox cluster: gateway, hosts, desktops."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from slime_cua.config.base import ConfigModel


class RemoteConfig(ConfigModel):
    """Machines that run OSWorld's or WindowsAgentArena's control server, and how each is brought back to its clean state."""

    urls: tuple[str, ...] = ()
    """Control servers, e.g. ("http://10.0.0.5:5000",): desktop n of a host is the n-th. At least num_desktops + num_spares."""
    reset: Literal["command", "endpoints", "none"] = "command"
    """Before each use. command: run reset_command here. endpoints: WindowsAgentArena's /setup/close_all and
    /setup/clear_task_files, which leave settings, registry and browser state as they are. none: state leaks between tasks."""
    reset_command: tuple[str, ...] = ()
    """Reverts the machine; {slot} and {url} are filled in. It must return when the revert is done, with exit code 0."""
    reset_timeout_s: float = Field(300.0, gt=0)
    cdp_port: int = Field(9222, ge=1, le=65535)
    vlc_port: int = Field(8080, ge=1, le=65535)
    """Ports of the machines for Chrome's debugger and VLC."""


class MachineConfig(ConfigModel):
    """The virtual machine of a desktop: of `qemu`, and of `docker` where the container holds one."""

    image: str = ""
    """qcow2 disk with an OSWorld control server, never written: each desktop has an overlay. docker: a path on the daemon's
    host, bound read-only at /System.qcow2; empty: the container itself is the desktop."""
    memory_mb: int = Field(4096, ge=64)
    num_cpus: int = Field(4, ge=1)
    disk_gb: int = Field(32, ge=1)
    """docker: size of the disk that the machine sees."""
    kvm: Literal["auto", "off"] = "auto"
    """auto: KVM is used if a probe guest really boots with it; otherwise, and with off, everything is emulated (TCG)."""


class DockerConfig(ConfigModel):
    """Containers with an OSWorld control server in them, or around a virtual machine (`machine.image`) that has one.

    A container is limited as a local desktop is (memory_mb, num_cpus, num_processes); one with a machine in it by the
    machine's own size and 2 GiB more.
    """

    image: str = "happysixd/osworld-docker"
    """It must be there: `docker pull` it first."""
    host: str = ""
    """The daemon, e.g. unix:///var/run/docker.sock; empty: as the docker command finds it (DOCKER_HOST)."""
    command: tuple[str, ...] = ()
    """Run instead of the image's own command."""


class QemuConfig(ConfigModel):
    """How this host starts virtual machines; what they are is `machine`."""

    arguments: tuple[str, ...] = ()
    """More arguments for qemu-system-x86_64, e.g. ("-kernel", "/srv/vmlinuz")."""
    disk_bus: Literal["virtio", "ide"] = "virtio"
    is_online: bool = False
    """The machine may reach the network; otherwise only this host reaches it."""


class DesktopConfig(ConfigModel):
    """What one desktop is. Providers get this part; a SandboxConfig is one, too."""

    screen_wh_px: tuple[int, int] = (1504, 832)
    """Any size from 64x64 to 8192x8192; screenshots have it, too."""
    memory_mb: int = Field(512, ge=64)
    """Of a local desktop, or of a container that is one; a virtual machine's is machine.memory_mb."""
    num_processes: int = Field(128, ge=16)
    """Processes and threads alive at once inside one desktop."""
    num_cpus: float = Field(2.0, ge=0.1)
    """CPU time of one desktop, in cores; where the machine's groups can limit it. Elsewhere desktops run at a lower priority."""
    disk_mb: int = Field(256, ge=16)
    """Size of HOME and of /tmp, each, at most a quarter of memory_mb: both are memory and vanish with the desktop."""
    boot_timeout_s: float = Field(30.0, gt=0)
    maximise: bool = False
    """Normal windows open maximised (dialogs do not)."""
    font_px: int = Field(13, ge=6, le=72)
    """Height of the one UI font (DejaVu Sans) in GTK, Tk and window titles."""
    theme: str = "Adwaita"
    """GTK theme."""
    background: str = Field("#3b4252", pattern="^#[0-9a-fA-F]{6}$")
    """Colour of the empty desktop."""
    accessibility: bool = False
    """Programs tell their accessibility tree (/accessibility, /terminal): 26 MB and slower program starts."""
    golden_home: str = ""
    """Folder copied into HOME of every desktop before anything starts; empty: HOME has our settings only."""
    first_uid: int = Field(60000, ge=1)
    """As root, desktop n runs as host user first_uid + n, or + 1000, + 2000, ... when that has an account or a desktop.
    Without root: as the caller."""
    os: Literal["ubuntu", "windows"] = "ubuntu"
    """What runs on the machines of `remote`, `docker` and `qemu`; local desktops are ubuntu."""
    client_password: str = "password"
    """The desktop user's, for sudo: setting a clock that a snapshot left behind. OSWorld's images have this one."""
    remote: RemoteConfig = Field(default_factory=RemoteConfig)
    machine: MachineConfig = Field(default_factory=MachineConfig)
    docker: DockerConfig = Field(default_factory=DockerConfig)
    qemu: QemuConfig = Field(default_factory=QemuConfig)


class SandboxConfig(DesktopConfig):
    gateway_url: str = ""
    """URL of a running gateway; empty: the driver starts a gateway and one host for the run, on loopback."""
    provider: str = "local"
    """local, docker, qemu, remote, fake, or a class of your own as module:Class."""
    num_desktops: int = Field(4, ge=1)
    """Desktops leased at once; the host keeps `num_spares` warm ones beside them."""
    num_spares: int = Field(1, ge=0)
    max_boots: int = Field(2, ge=1)
    """Desktops booting at once; the number of cores is a good value."""
    acquire_timeout_s: float = Field(120.0, gt=0)
    """How long an episode waits in the gateway's queue for a desktop."""
    setup_timeout_s: float = Field(60.0, gt=0)
    """All set-up steps of a task together."""
    step_timeout_s: float = Field(30.0, gt=0)
    """One GUI step, screenshot included; what a step itself asks to wait comes on top. Past it the desktop is ended."""
    execute_timeout_s: float = Field(30.0, gt=0)
    """One code action; past it the program is killed and the policy is told so."""
    evaluate_timeout_s: float = Field(60.0, gt=0)
    """All judges of a task together."""
    max_body_mb: int = Field(512, ge=1)
    """Largest body of a call on a lease at gateway and host (MiB): OSWorld's uploads pass, a body without end does not."""
    settle_quiet_ms: int = Field(60, ge=0)
    """A screenshot is taken when the screen has not changed for so long: a floor under the time of every step."""
    settle_max_ms: int = Field(1000, ge=0)
    """Then it is taken anyway."""

    @field_validator("provider")
    @classmethod
    def _known_provider(cls, name: str) -> str:
        known = ("local", "docker", "qemu", "remote", "fake")
        if name not in known and not re.fullmatch(r"[\w.]+:\w+", name):
            raise ValueError(f"use {', '.join(known)}, or module:Class")
        return name
