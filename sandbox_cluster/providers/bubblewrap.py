"""The bubblewrap commands of a local desktop: what of the host is visible inside, and who inside can reach whom.

Two sandboxes, one in the other. The outer one has the namespaces, the files and Xvfb. In it, beside Xvfb, the inner one
has a pid namespace of its own, whose first process is our agent; all programs are the agent's children. So a program can
neither signal nor see Xvfb, and the kernel lets nobody inside kill the first process of a pid namespace: `kill -9 -1`
ends programs, not the desktop.
"""

from __future__ import annotations

import os
from pathlib import Path

from sandbox_cluster.providers.base import HOME
from slime_cua.config.sandbox import DesktopConfig

AGENT_PATH = "/agent.py"
MODULES_PATH = "/opt/lib"
"""Python modules of ours for programs inside (PYTHONPATH in agent.py)."""
CHROME_PATH = "/opt/bin/google-chrome"
CHROME = b"""#!/bin/sh
exec chromium --no-sandbox --disable-gpu --no-first-run --password-store=basic --user-data-dir="$HOME/.config/google-chrome" "$@"
"""
"""What OSWorld's tasks call Chrome, if the machine has Chromium; its own sandbox needs the namespaces that ours denies."""
_ETC = (
    "fonts", "alternatives", "xdg", "X11", "gtk-2.0", "gtk-3.0", "mime.types", "localtime", "timezone",
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "dbus-1", "libreoffice", "chromium", "chromium.d", "ssl/certs",
    "python3", "python3.11", "python3.12", "python3.13", "papersize", "magic", "dconf", "debian_version",
    "os-release", "vlc", "thunderbird", "default/locale", "bash.bashrc", "profile",
)  # fmt: skip
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:User:/home/user:/bin/bash\n"
_GROUP = "root:x:0:\nuser:x:1000:\n"
_HOSTS = "127.0.0.1 localhost desktop\n::1 localhost\n"
_NSSWITCH = "passwd: files\ngroup: files\nhosts: files\n"
_RUN_MB = 8
FRAMEBUFFER_DIR = "/run/fb"
"""Hidden from programs: they could cut or paint the picture."""
_INSIDE = """
control=$1 size=$2 x_filter=$3 filter=$4
exec {display}< <(exec bwrap --dev-bind / / --seccomp $x_filter -- Xvfb -displayfd 1 -screen 0 ${size}x24 \
    -fbdir FRAMEBUFFER_DIR -extension GLX -ac -noreset -s 0 -dpms -dpi 96 -nolisten tcp -br 2>/dev/null {control}>&-)
exec {frame}<FRAMEBUFFER_DIR
exec bwrap --unshare-user --unshare-pid --as-pid-1 --die-with-parent --uid 1000 --gid 1000 --cap-drop ALL \
    --dev-bind / / --tmpfs FRAMEBUFFER_DIR --remount-ro FRAMEBUFFER_DIR --proc /proc --seccomp $filter -- \
    /usr/bin/python3 -I -S AGENT_PATH $control $display $frame
""".replace("FRAMEBUFFER_DIR", FRAMEBUFFER_DIR).replace("AGENT_PATH", AGENT_PATH)
"""Runs in the outer sandbox: Xvfb, which writes its number to `display`, and the inner sandbox."""


class DataFiles:
    """Contents handed to bubblewrap as open files, so that the sandbox user needs no right to our paths."""

    def __init__(self) -> None:
        self.files: list[int] = []

    def add(self, data: bytes) -> int:
        file = os.memfd_create("data", 0)
        self.files.append(file)
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.lseek(file, 0, os.SEEK_SET)
        return file

    def close(self) -> None:
        while self.files:
            os.close(self.files.pop())


def arguments(config: DesktopConfig, own: dict[str, bytes], data: DataFiles) -> list[str]:
    """Arguments of the outer bwrap up to and without the program; `data` gets the files they name. `own`: our files
    inside by path."""
    return [
        *_namespaces(),
        *_system_folders(),
        *_etc_files(data),
        *("--proc", "/proc", "--dev", "/dev"),
        *_tmpfs("/dev/shm", config.memory_mb // 8),
        *_tmpfs("/tmp", _files_mb(config)),
        *("--perms", "1777", "--dir", "/tmp/.X11-unix"),
        *_tmpfs("/run", _RUN_MB),
        *("--dir", FRAMEBUFFER_DIR),
        *_tmpfs(HOME, _files_mb(config)),
        *(
            word
            for path, file in own.items()
            for word in ("--perms", "0755", "--ro-bind-data", str(data.add(file)), path)
        ),
        *("--remount-ro", "/"),
    ]


def program(config: DesktopConfig, control: int, seccomp: bytes, data: DataFiles) -> list[str]:
    """What the outer sandbox runs: Xvfb, and the agent with the `control` socket in the inner sandbox."""
    width, height = config.screen_wh_px
    filters = [str(data.add(seccomp)) for _ in range(2)]
    return ["/bin/bash", "-c", _INSIDE, "inside", str(control), f"{width}x{height}", *filters]


def _namespaces() -> list[str]:
    flags = ["user", "ipc", "pid", "net", "uts", "cgroup"]
    return [
        *(f"--unshare-{name}" for name in flags),
        *("--die-with-parent", "--new-session", "--clearenv"),
        *("--uid", "1000", "--gid", "1000", "--hostname", "desktop", "--chdir", "/"),
        *("--cap-drop", "ALL"),
    ]


def _system_folders() -> list[str]:
    lines = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64", "lib32"):
        path = Path("/") / name
        if path.is_symlink():
            lines += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            lines += ["--ro-bind", str(path), str(path)]
    lines += ["--symlink", "/usr/bin/python3", "/opt/bin/python"]
    for cache in ("/var/cache/fontconfig", "/var/lib/dbus"):
        lines += ["--ro-bind-try", cache, cache]
    return lines


def _etc_files(data: DataFiles) -> list[str]:
    lines: list[str] = []
    for name in _ETC:
        lines += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    own = {
        "passwd": _PASSWD,
        "group": _GROUP,
        "hosts": _HOSTS,
        "nsswitch.conf": _NSSWITCH,
        "machine-id": "0" * 31 + "1\n",
    }
    for name, text in own.items():
        lines += ["--ro-bind-data", str(data.add(text.encode())), f"/etc/{name}"]
    return lines


def _files_mb(config: DesktopConfig) -> int:
    """Size of HOME and of /tmp. Files are memory: full of files, the desktop must still have room for its agent and Xvfb."""
    return min(config.disk_mb, config.memory_mb // 4)


def _tmpfs(path: str, size_mb: int) -> list[str]:
    return ["--size", str(size_mb << 20), "--tmpfs", path]
