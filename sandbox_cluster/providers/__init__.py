"""Sandbox providers by name."""

from __future__ import annotations

import importlib
from pathlib import Path

from sandbox_cluster.providers.base import SandboxProvider
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.errors import ConfigError

PROVIDERS = {
    "local": "sandbox_cluster.providers.local:LocalProvider",
    "remote": "sandbox_cluster.providers.remote:RemoteProvider",
    "docker": "sandbox_cluster.providers.docker:DockerProvider",
    "qemu": "sandbox_cluster.providers.qemu:QemuProvider",
    "fake": "sandbox_cluster.providers.fake:FakeProvider",
}
"""Name -> "module:Class". A user's own class may be named in the same form."""


def make_provider(
    name: str, config: DesktopConfig, state_dir: Path, label: str, max_boots: int = 2
) -> SandboxProvider:
    """The provider called `name`, or the class "module:Name". ConfigError for an unknown one.

    `label` names the owner across restarts (one per host agent): reap() ends what the same label left in state_dir.
    """
    target = PROVIDERS.get(name, name)
    module_name, _, class_name = target.partition(":")
    if not class_name:
        raise ConfigError(
            f"unknown sandbox provider {name!r}; have {', '.join(sorted(PROVIDERS))}, or module:Class"
        )
    try:
        provider_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"sandbox provider {name!r} cannot be loaded: {error}") from error
    provider: SandboxProvider = provider_class(config, state_dir, label, max_boots)
    return provider
