"""A gateway and one host for the length of a block, on loopback and free ports. Nothing outlives the block or its process.

    async with LocalCluster(config.sandbox, run_dir / "sandbox") as cluster:
        async with SandboxClient(cluster.url, cluster.token, config.sandbox) as client: ...

The two are tied to this process by their stdin: when it ends in whatever way, they end, and the desktops with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from sandbox_cluster.serving import bind
from slime_cua.config.sandbox import SandboxConfig
from slime_cua.core.errors import PreflightError, SandboxError

CLIENT_TOKENS = "SLIME_CUA_CLIENT_TOKENS"
HOST_TOKENS = "SLIME_CUA_HOST_TOKENS"
STOP_S = 8.0
MAX_RESTARTS = 5
WINDOW_S = 3600.0
"""More than MAX_RESTARTS of gateway and host together within it, and the desktops are given up."""
log = logging.getLogger(__name__)
PROJECT = Path(__file__).resolve().parent.parent


class LocalCluster:
    """`url` and `token` are set inside the block. Works with `with` and `async with`."""

    def __init__(
        self,
        config: SandboxConfig,
        state_dir: Path,
        *,
        host_id: str = "",
        start_timeout_s: float = 60.0,
        host_arguments: tuple[str, ...] = (),
    ) -> None:
        self.config, self.state_dir = config, state_dir
        self.url, self.token = "", ""
        mark = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:8]
        self._host_id = host_id or f"run-{mark}"
        self._start_timeout_s, self._host_arguments = start_timeout_s, host_arguments
        self._host_token = ""
        self.num_restarts = 0
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        """When the last ones were, on the monotonic clock."""
        self._untold: deque[str] = deque()
        self.failure: str | None = None
        """Why the desktops are gone for good; None while they are not."""
        self.gateway: Service | None = None
        self.host: Service | None = None

    def start(self) -> None:
        """Start both and wait until the host is registered. Raises PreflightError with the failing one's own sentence."""
        self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.token, self._host_token = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        try:
            with bind("127.0.0.1", 0) as sock:
                self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
                self.gateway = self._gateway("--listen-fd", str(sock.fileno()), handles=(sock.fileno(),))
            self.host = self._host()
            for service in (self.gateway, self.host):
                service.wait_ready(self._start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def start_gateway(self, port: int = 0) -> None:
        """Start the gateway; again, with the old port, after it died."""
        self.gateway = self._gateway("--port", str(port))
        self.gateway.wait_ready(self._start_timeout_s)
        self.url = f"http://127.0.0.1:{self.gateway.port}"

    def start_host(self) -> None:
        """Start the host agent; again after it died."""
        self.host = self._host()
        self.host.wait_ready(self._start_timeout_s)

    def _gateway(self, *listen: str, handles: tuple[int, ...] = ()) -> Service:
        return Service(
            "gateway",
            [
                *listen,
                "--state",
                str(self.state_dir / "gateway"),
                "--max-body-mb",
                str(self.config.max_body_mb),
            ],
            {CLIENT_TOKENS: f"run:{self.token}", HOST_TOKENS: f"run:{self._host_token}"},
            self.state_dir / "gateway.log",
            handles,
        )

    def _host(self) -> Service:
        config = self.state_dir / "host.json"
        config.write_text(self.config.model_dump_json())
        return Service(
            "host",
            [
                "--gateway",
                self.url,
                "--config",
                str(config),
                "--host-id",
                self._host_id,
                "--state",
                str(self.state_dir / "host"),
                *self._host_arguments,
            ],
            {HOST_TOKENS: f"run:{self._host_token}"},
            self.state_dir / "host.log",
        )

    @contextlib.contextmanager
    def watched(self, every_s: float = 1.0) -> Iterator[None]:
        """Restart what dies during the block: the gateway with its port and its leases, the host with fresh desktops.

        After MAX_RESTARTS within WINDOW_S, or when a restart fails, `check` raises.
        """
        is_over = threading.Event()

        def watch() -> None:
            try:
                while not is_over.wait(every_s):
                    self.mend()
            except (PreflightError, OSError) as error:
                self.failure = str(error)

        watching = threading.Thread(target=watch, name="cluster-watch", daemon=True)
        watching.start()
        try:
            yield
        finally:
            is_over.set()
            watching.join(2 * self._start_timeout_s)

    def mend(self) -> None:
        """Start again what has died. Raises PreflightError when that fails or was needed too often."""
        for service in (self.gateway, self.host):
            if service is None or service.process.poll() is None:
                continue
            now = time.monotonic()
            self.num_restarts += 1
            self._untold.append(service.name)
            code = service.process.returncode
            log.warning("the sandbox %s died (code %s): restarting it", service.name, code)
            if len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < WINDOW_S:
                raise PreflightError(
                    f"the sandbox {service.name} died again (code {code}), after {MAX_RESTARTS} restarts within "
                    f"{WINDOW_S / 60:.0f} minutes: see {self.state_dir}/{service.name}.log"
                )
            self._restarts.append(now)
            service.stop()
            if service is self.gateway:
                self.start_gateway(service.port)
            else:
                self.start_host()

    def take_restarts(self) -> list[str]:
        """Names of the services that were restarted since the last call."""
        return [self._untold.popleft() for _ in range(len(self._untold))]

    def check(self) -> None:
        """SandboxError when the desktops are gone for good."""
        if self.failure is not None:
            raise SandboxError(self.failure)

    def stop(self) -> None:
        """End both. May be repeated."""
        for service in (self.host, self.gateway):
            if service is not None:
                service.stop()

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> LocalCluster:
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(PreflightError):
                await starting
            self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.to_thread(self.stop))


class Service:
    """One of our processes, tied to this one. Its log is kept in a file. `port` is known after wait_ready."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        environment: dict[str, str],
        log: Path,
        handles: tuple[int, ...] = (),
    ) -> None:
        self.name, self._log = name, log
        self.port = 0
        self._ready, ready_write = os.pipe()
        tie = ["--ready-fd", str(ready_write), "--tied-to-stdin"]
        with log.open("ab") as log_file:
            self._log_start = log_file.tell()
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", f"sandbox_cluster.{name}", *arguments, *tie],
                    stdin=subprocess.PIPE,
                    stdout=log_file,
                    stderr=log_file,
                    pass_fds=(ready_write, *handles),
                    env=_environment(environment),
                    start_new_session=True,
                )
            except BaseException:
                os.close(self._ready)
                raise
            finally:
                os.close(ready_write)

    def wait_ready(self, timeout_s: float) -> None:
        """Return when it serves. Raises PreflightError with its own sentence; it is ended then."""
        try:
            self.port = self._wait_ready(self._ready, timeout_s)
        except BaseException:
            self.stop()
            raise
        os.close(self._ready)
        self._ready = -1

    def _wait_ready(self, ready: int, timeout_s: float) -> int:
        end = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            left_s = end - time.monotonic()
            if left_s <= 0 or not select.select([ready], [], [], left_s)[0]:
                raise PreflightError(
                    f"the sandbox {self.name} was not ready within {timeout_s:g} s: {self._last_words()}"
                )
            part = os.read(ready, 4096)
            if not part:
                self.process.wait(STOP_S)
                raise PreflightError(self._last_words())
            line += part
        return int(json.loads(line)["port"])

    def _last_words(self) -> str:
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()
        sentences = [line for line in lines if line.startswith(f"sandbox {self.name}: ")]
        return (sentences or lines or ["it said nothing"])[-1] + f" (log: {self._log})"

    def stop(self) -> None:
        """End it: close the tie, then kill what does not go. May be repeated."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _environment(more: dict[str, str]) -> dict[str, str]:
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}
