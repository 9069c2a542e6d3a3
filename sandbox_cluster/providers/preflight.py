"""Can this machine run local desktops? If not: what is missing, and the line that brings it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.errors import PreflightError

PACKAGES = {
    "bwrap": "bubblewrap",
    "Xvfb": "xvfb",
    "xkbcomp": "x11-xkb-utils",
    "openbox": "openbox",
    "/usr/bin/python3": "python3",
}
"""Program -> Debian and Ubuntu package."""
DESKTOP_PACKAGES = (
    "xvfb xauth x11-xkb-utils openbox bubblewrap wmctrl xdotool xterm mousepad galculator pcmanfm gnumeric python3-tk "
    "dbus dbus-x11 fonts-dejavu-core fontconfig x11-utils"
)
_ACCESSIBILITY = ("/usr/libexec/at-spi-bus-launcher", "/usr/lib/python3/dist-packages/gi")
_MAX_SIDE_PX = 8192


@dataclass(frozen=True)
class MachineFacts:
    """What decides whether sandboxes work; gathered by `gather`, judged by `explain`."""

    system: str
    missing_programs: tuple[str, ...]
    trial_error: str | None
    """What bubblewrap said when it was to run `true` in a sandbox within a sandbox; None when that worked."""
    apparmor_restricts: bool = False
    """kernel.apparmor_restrict_unprivileged_userns (Ubuntu 23.10 and later)."""
    clone_forbidden: bool = False
    """kernel.unprivileged_userns_clone = 0 (Debian kernels)."""
    max_user_namespaces: int | None = None
    has_font: bool = True


def check_machine(config: DesktopConfig) -> None:
    """PreflightError unless local desktops of this size can run here."""
    width, height = config.screen_wh_px
    if not (64 <= width <= _MAX_SIDE_PX and 64 <= height <= _MAX_SIDE_PX):
        raise PreflightError(f"screen_wh_px = {config.screen_wh_px}: each side must be in 64..{_MAX_SIDE_PX}")
    if config.accessibility and not all(Path(path).exists() for path in _ACCESSIBILITY):
        raise PreflightError(
            "sandbox.accessibility needs AT-SPI; as root: apt-get install -y --no-install-recommends "
            "at-spi2-core gir1.2-atspi-2.0 python3-gi"
        )
    fault = explain(gather(user=config.first_uid if os.getuid() == 0 else None))
    if fault is not None:
        raise PreflightError(fault)


def gather(path: str | None = None, user: int | None = None) -> MachineFacts:
    """Facts of this machine; programs are looked up in `path` (default: $PATH), the trial runs as `user` (default: us)."""
    missing = tuple(name for name in PACKAGES if shutil.which(name, path=path) is None)
    return MachineFacts(
        system=platform.system(),
        missing_programs=missing,
        trial_error=None if "bwrap" in missing else _trial(user),
        apparmor_restricts=_number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1,
        clone_forbidden=_number("/proc/sys/kernel/unprivileged_userns_clone") == 0,
        max_user_namespaces=_number("/proc/sys/user/max_user_namespaces"),
        has_font=any(Path("/usr/share/fonts").rglob("DejaVuSans.ttf")) if not missing else True,
    )


def explain(facts: MachineFacts) -> str | None:
    """What is wrong and the line that mends it, or None."""
    if facts.system != "Linux":
        return f"local desktops need Linux, this is {facts.system}; use provider=remote or docker"
    if facts.missing_programs:
        packages = " ".join(PACKAGES[name] for name in facts.missing_programs)
        return (
            f"local desktops need {', '.join(facts.missing_programs)}; as root: "
            f"apt-get install -y --no-install-recommends {packages}\n(all desktop packages: {DESKTOP_PACKAGES})"
        )
    if not facts.has_font:
        return "no DejaVu fonts; as root: apt-get install -y --no-install-recommends fonts-dejavu-core"
    if facts.trial_error is None:
        return None
    if facts.apparmor_restricts:
        line = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        return f"this system forbids user namespaces to programs without a profile (Ubuntu 24.04); as root: {line}"
    if facts.clone_forbidden:
        return "user namespaces are switched off; as root: sysctl -w kernel.unprivileged_userns_clone=1"
    if facts.max_user_namespaces == 0:
        return "user namespaces are limited to none; as root: sysctl -w user.max_user_namespaces=15000"
    return (
        f"bubblewrap cannot make a sandbox here: {facts.trial_error}\n"
        "In a container, start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
        "--security-opt systempaths=unconfined, or use provider=remote"
    )


def _trial(user: int | None) -> str | None:
    outer = "bwrap --unshare-all --die-with-parent --ro-bind / / --proc /proc --dev /dev"
    inner = "bwrap --unshare-user --unshare-pid --die-with-parent --dev-bind / / --proc /proc true"
    command = [*outer.split(), "--", *inner.split()]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False, cwd="/", user=user, group=user
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
