"""Sandbox cluster: gateway, hosts, desktops."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_cua.config.base import ConfigModel


class SandboxConfig(ConfigModel):
    gateway_url: str = ""
    """URL of a running gateway; empty: the driver starts a gateway and one host for the run, on loopback."""
    provider: Literal["local", "docker", "qemu", "remote", "fake"] = "local"
    num_desktops: int = Field(4, ge=1)
    """Desktops leased at once; the host keeps `num_spares` warm ones beside them."""
    num_spares: int = Field(1, ge=0)
    max_boots: int = Field(2, ge=1)
    """Desktops booting at once; the number of cores is a good value."""
    screen_wh_px: tuple[int, int] = (1504, 832)
    memory_mb: int = Field(512, ge=64)
    num_processes: int = Field(128, ge=16)
    acquire_timeout_s: float = 120.0
    setup_timeout_s: float = 60.0
    step_timeout_s: float = 30.0
    execute_timeout_s: float = 30.0
    evaluate_timeout_s: float = 60.0
    settle_quiet_ms: int = 60
    settle_max_ms: int = 1000
