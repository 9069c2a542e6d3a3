"""Sandbox cluster: gateway, hosts, desktops."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_cua.config.base import ConfigModel


class DesktopConfig(ConfigModel):
    """What one desktop is. Providers get this part; a SandboxConfig is one, too."""

    screen_wh_px: tuple[int, int] = (1504, 832)
    """Any size from 64x64 to 8192x8192; screenshots have it, too."""
    memory_mb: int = Field(512, ge=64)
    num_processes: int = Field(128, ge=16)
    """Processes and threads alive at once inside one desktop."""
    disk_mb: int = Field(256, ge=16)
    """Size of HOME and of /tmp, each; both are memory and vanish with the desktop."""
    boot_timeout_s: float = Field(30.0, gt=0)
    maximise: bool = False
    """Normal windows open maximised (dialogs do not)."""
    font_px: int = Field(13, ge=6, le=72)
    """Height of the one UI font (DejaVu Sans) in GTK, Tk and window titles."""
    theme: str = "Adwaita"
    """GTK theme."""
    background: str = Field("#3b4252", pattern="^#[0-9a-fA-F]{6}$")
    """Colour of the empty desktop."""
    golden_home: str = ""
    """Folder copied into HOME of every desktop before anything starts; empty: HOME has our settings only."""
    first_uid: int = Field(60000, ge=1)
    """As root, desktop n runs as host user first_uid + n, or + 1000, + 2000, ... when that has an account or a desktop.
    Without root: as the caller."""


class SandboxConfig(DesktopConfig):
    gateway_url: str = ""
    """URL of a running gateway; empty: the driver starts a gateway and one host for the run, on loopback."""
    provider: Literal["local", "docker", "qemu", "remote", "fake"] = "local"
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
    settle_quiet_ms: int = Field(60, ge=0)
    """A screenshot is taken when the screen has not changed for so long: a floor under the time of every step."""
    settle_max_ms: int = Field(1000, ge=0)
    """Then it is taken anyway."""
