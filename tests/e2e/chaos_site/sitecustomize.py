"""Put on the path of gateway and host by the chaos test: their wall clock is off by the seconds in the file CHAOS_CLOCK."""

import os
import time
from pathlib import Path

_real, _file = time.time, Path(os.environ["CHAOS_CLOCK"])


def _shifted() -> float:
    try:
        return _real() + float(_file.read_text())
    except (OSError, ValueError):
        return _real()


time.time = _shifted
