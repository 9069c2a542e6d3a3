"""What a publish says of itself. Apart from the publishers: the driver reads it and has no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PublishReport:
    """What one publish did."""

    version: int
    num_tensors: int
    num_bytes: int
    checksum: str
    engines: tuple[str, ...]
    """URLs that serve the new version."""
    failures: Mapping[str, str]
    """URL -> phase and reason. These engines are paused or gone, and serve nothing."""
    seconds: Mapping[str, float]
    """Per phase: write (where a folder is made), pause, flush, transfer, check, version, continue, probe; `paused` is the time from the
    first pause to the last continue."""
    folder: Path | None = None
    """Checkpoint folder of this version, when the way makes one."""
