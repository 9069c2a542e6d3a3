"""What the provider suite needs beside the providers: machines for `remote`, a daemon and an image for `docker`, a disk for `qemu`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slime_cua.config.sandbox import DesktopConfig, DockerConfig, RemoteConfig
from tests.contract import guest_rootfs
from tests.contract.guest_rootfs import SIZE

NUM_MACHINES = 3
SDK = Path(__file__).resolve().parents[2] / ".venvs" / "docker"
"""Docker's SDK may be there instead of in the test environment."""


@dataclass
class Machine:
    """A stand-in control server under bubblewrap: private HOME and /tmp, the host's network. Restarted at the same port."""

    windows: bool
    sock: socket.socket = field(default_factory=socket.socket)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.sock.bind(("127.0.0.1", 0))
        self.sock.listen(64)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.sock.getsockname()[1]}"

    def restart(self) -> None:
        self.stop()
        handle = str(self.sock.fileno())
        flags = ["--windows"] if self.windows else ["--broken-bash"]
        box = [
            "bwrap",
            "--ro-bind",
            "/",
            "/",
            "--dev",
            "/dev",
            "--proc",
            "/proc",
            "--unshare-pid",
            "--die-with-parent",
        ]
        box += ["--tmpfs", "/home", "--tmpfs", "/tmp", "--dir", "/home/user", "--chdir", "/home/user"]
        box += ["--ro-bind", str(guest_rootfs.GUEST), "/home/guest.py", "--setenv", "HOME", "/home/user"]
        box += [
            "--ro-bind",
            "/usr/bin/python3",
            "/home/bin/python",
            "--setenv",
            "PATH",
            "/home/bin:/usr/bin:/bin",
        ]
        program = ["/usr/bin/python3", "/home/guest.py", "--fd", handle, *flags]
        self.process = subprocess.Popen(
            [*box, *program], stdout=subprocess.PIPE, pass_fds=(self.sock.fileno(),), start_new_session=True
        )
        assert self.process.stdout
        assert self.process.stdout.readline() == b"up\n"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout
            self.process.stdout.close()


@contextlib.asynccontextmanager
async def remote_machines(folder: Path, windows: bool = False) -> AsyncIterator[DesktopConfig]:
    """NUM_MACHINES stand-ins and the config that names them. Their reset command knocks at a socket of ours."""
    machines = [Machine(windows) for _ in range(NUM_MACHINES)]

    async def knock(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        slot = int(await reader.readline())
        await asyncio.to_thread(machines[slot].restart)
        writer.write(b"done\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(knock, folder / "reset")
    line = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
        "s.sendall(sys.argv[2].encode() + b'\\n'); assert s.recv(9) == b'done\\n'"
    )
    command = (sys.executable, "-I", "-c", line, str(folder / "reset"), "{slot}")
    try:
        yield DesktopConfig(
            screen_wh_px=SIZE,
            os="windows" if windows else "ubuntu",
            remote=RemoteConfig(urls=tuple(one.url for one in machines), reset_command=command),
        )
    finally:
        server.close()
        for machine in machines:
            machine.stop()
            machine.sock.close()


@dataclass
class Daemon:
    """A docker daemon of our own with one image."""

    url: str
    image: str

    def config(self) -> DesktopConfig:
        return DesktopConfig(
            screen_wh_px=SIZE,
            memory_mb=256,
            num_cpus=1,
            num_processes=128,
            docker=DockerConfig(
                host=self.url,
                image=self.image,
                command=("/usr/bin/python3", "/srv/osworld_guest.py", "--broken-bash"),
            ),
        )


def docker_is_missing() -> str:
    """Why the docker provider cannot be tried here; empty when it can."""
    if SDK.is_dir() and str(SDK) not in sys.path:
        sys.path.append(str(SDK))
    if os.environ.get("SLIME_CUA_DOCKER_HOST"):
        return ""
    if os.getuid() != 0 or not shutil.which("dockerd"):
        return "needs root and dockerd (apt-get install docker.io), or SLIME_CUA_DOCKER_HOST"
    try:
        import docker  # noqa: F401
    except ImportError:
        return "needs Docker's SDK: pip install --no-deps --target .venvs/docker docker"
    return ""


@contextlib.contextmanager
def docker_daemon(folder: Path) -> Iterator[Daemon]:
    """A daemon for the block: the one of SLIME_CUA_DOCKER_HOST, or one of ours with its own bridge, both gone afterwards."""
    image = f"slime-cua-guest:{os.getpid()}"
    with contextlib.ExitStack() as stack:
        url = os.environ.get("SLIME_CUA_DOCKER_HOST") or stack.enter_context(_own_daemon(folder))
        root = guest_rootfs.build(folder / "root")
        packed = subprocess.run(["tar", "-C", str(root), "-c", "."], capture_output=True, check=True).stdout
        options = [
            "--change",
            "ENV PATH=/usr/bin",
            "--change",
            "ENV HOME=/home/user",
            "--change",
            "WORKDIR /home/user",
        ]
        subprocess.run(
            ["docker", "-H", url, "import", *options, "-", image],
            input=packed,
            check=True,
            capture_output=True,
        )
        try:
            yield Daemon(url, image)
        finally:
            subprocess.run(["docker", "-H", url, "rmi", "-f", image], capture_output=True, check=False)


@contextlib.contextmanager
def _own_daemon(folder: Path) -> Iterator[str]:
    number = os.getpid() % 250
    bridge, url = f"cua{os.getpid()}", f"unix://{folder}/docker.sock"
    subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], check=True)
    try:
        subprocess.run(["ip", "addr", "add", f"10.213.{number}.1/24", "dev", bridge], check=True)
        subprocess.run(["ip", "link", "set", bridge, "up"], check=True)
        line = [
            "dockerd",
            "--iptables=false",
            "--ip6tables=false",
            "--bridge",
            bridge,
            "-H",
            url,
            "--group",
            "root",
        ]
        line += [
            "--data-root",
            f"{folder}/data",
            "--exec-root",
            f"{folder}/exec",
            "--pidfile",
            f"{folder}/pid",
        ]
        with (folder / "dockerd.log").open("wb") as log:
            daemon = subprocess.Popen(line, stdout=log, stderr=log)
        try:
            _until_it_answers(url, daemon, folder / "dockerd.log")
            yield url
        finally:
            daemon.terminate()
            daemon.wait(60)
    finally:
        subprocess.run(["ip", "link", "del", bridge], check=False)


def _until_it_answers(url: str, daemon: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while subprocess.run(["docker", "-H", url, "version"], capture_output=True, check=False).returncode != 0:
        if daemon.poll() is not None or time.monotonic() > end:
            pytest.skip(f"dockerd does not run here: {log.read_text()[-400:]}")
        time.sleep(0.2)
