"""The bubblewrap command of a local desktop: what of the host is visible inside, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from sandbox_cluster.providers.base import HOME
from slime_cua.config.sandbox import DesktopConfig

AGENT_PATH = "/agent.py"
MODULES_PATH = "/opt/lib"
"""Python modules of ours for programs inside (PYTHONPATH in agent.py)."""
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
_RUN_MB, _SHM_MB = 64, 64


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


def arguments(config: DesktopConfig, own: dict[str, bytes], seccomp: bytes, data: DataFiles) -> list[str]:
    """Arguments of bwrap up to and without the program; `data` gets the files they name. `own`: our files inside by path."""
    return [
        *_namespaces(),
        *_system_folders(),
        *_etc_files(data),
        *("--proc", "/proc", "--dev", "/dev"),
        *_tmpfs("/dev/shm", _SHM_MB),
        *_tmpfs("/tmp", config.disk_mb),
        *_tmpfs("/run", _RUN_MB),
        *_tmpfs(HOME, config.disk_mb),
        *(word for path, file in own.items() for word in ("--ro-bind-data", str(data.add(file)), path)),
        *("--remount-ro", "/"),
        *("--seccomp", str(data.add(seccomp))),
    ]


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


def _tmpfs(path: str, size_mb: int) -> list[str]:
    return ["--size", str(size_mb << 20), "--tmpfs", path]
