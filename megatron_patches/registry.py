"""The registry: what a patch is, when each kind is applied, and the check of upstream versions.

A patch belongs to one phase:
  before_import  replaces modules that megatron-core or mcore-bridge would import
  after_import   replaces functions of the imported packages
  model          corrects a model that was just built (called with the model and its config)
  gradients      runs between backward and Megatron's finalize_model_grads (called with the model and its config)
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

logger = logging.getLogger(__name__)

Phase = Literal["before_import", "after_import", "model", "gradients"]


class UntestedVersionError(RuntimeError):
    """An installed package has a version that the patches were not tried on."""


@dataclass(frozen=True)
class Patch:
    """One named correction of an upstream package."""

    name: str
    phase: Phase
    symptom: str
    """What a user sees without it, in one line."""
    install: Callable[..., Any]
    """before_import, after_import: no arguments. model, gradients: (model, config)."""
    is_needed: Callable[[], bool] = lambda: True
    """Whether this machine needs it at all, e.g. only without CUDA."""


TESTED_VERSIONS: dict[str, tuple[str, ...]] = {
    "megatron-core": ("0.16.1",),
    "mcore_bridge": ("1.6.5",),
}


def check_versions(installed: dict[str, str] | None = None) -> None:
    """Raise UntestedVersionError unless each upstream package has a version the patches were tried on.

    installed: package -> version; None asks the environment.
    """
    for package, tested in TESTED_VERSIONS.items():
        found = (installed or {}).get(package) or _version(package)
        if found not in tested:
            raise UntestedVersionError(
                f"{package} {found} is installed, but megatron_patches was tried on {', '.join(tested)} only; "
                f"install {package}=={tested[-1]}, or run tests/numerics on {found} and add it to TESTED_VERSIONS"
            )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(missing)"


def run(patches: tuple[Patch, ...], phase: Phase, *arguments: Any) -> list[str]:
    """Install the needed patches of one phase, log each, and return their names."""
    applied = []
    for patch in patches:
        if patch.phase == phase and patch.is_needed():
            patch.install(*arguments)
            logger.info("patch %s: %s", patch.name, patch.symptom)
            applied.append(patch.name)
    return applied
