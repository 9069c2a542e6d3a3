"""One policy server process: started, watched, ended; it never outlives its owner."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import httpx

from rollout.engines.commands import SGLANG_ENVIRONMENT, SGLANG_SITE, embedded_command, sglang_command
from slime_cua.config.rollout import EngineConfig
from slime_cua.core.errors import EngineError
from slime_cua.core.ports import free_port

_STOP_S = 10.0
_LOG_TAIL_LINES = 15


class EngineProcess:
    """Owns one server. Use as a context manager, or call `stop`.

    Example: with EngineProcess(config, Path("models/tiny_base"), Path("runs/x/engines/0.log")) as engine: engine.url
    """

    def __init__(
        self, config: EngineConfig, model: Path, log_path: Path, *, version: int = 0, device: str = "cpu"
    ) -> None:
        self._config = config
        self._model = model
        self._log_path = log_path
        self._version = version
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self.url = ""

    def __enter__(self) -> EngineProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the server or, for SGLang, of its guardian. 0 when there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> str:
        """Start the server and wait until it answers; its URL.

        Raises EngineError with the end of the log when it exits or is not ready within engine.start_timeout_s.
        """
        self.stop()
        deadline_s = time.monotonic() + self._config.start_timeout_s
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._log_path.open("ab") as log:
                if self._config.kind == "embedded":
                    self.url = self._start_embedded(log, deadline_s)
                else:
                    self.url = self._start_sglang(log, deadline_s)
        except BaseException:
            self.stop()
            raise
        return self.url

    def restart(self) -> str:
        """End the server, start a new one on the same port, so that clients find it again; its URL."""
        return self.start()

    def stop(self) -> None:
        """End the server and everything it started. Safe to call again."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_STOP_S)
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        process.wait()

    def _start_embedded(self, log: IO[bytes], deadline_s: float) -> str:
        with tempfile.TemporaryDirectory(prefix="slime_cua_engine_") as folder:
            ready = Path(folder) / "url"
            port = self._port = self._port or free_port()
            command = embedded_command(self._config, self._model, ready, port, self._version, self._device)
            self._spawn(command, log, {"OMP_NUM_THREADS": str(self._config.num_threads)})
            while not ready.exists():
                self._check_still_starting(deadline_s)
                time.sleep(0.05)
            return ready.read_text()

    def _start_sglang(self, log: IO[bytes], deadline_s: float) -> str:
        port = self._port = self._port or free_port()
        command = sglang_command(self._config, self._model, "127.0.0.1", port, self._version)
        guarded = [sys.executable, "-m", "rollout.engines.lifeline", "--", *command]
        self._spawn(guarded, log, SGLANG_ENVIRONMENT, (str(SGLANG_SITE),))
        url = f"http://127.0.0.1:{port}"
        while True:
            self._check_still_starting(deadline_s)
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            time.sleep(0.5)
        try:
            left_s = max(5.0, deadline_s - time.monotonic())
            reply = httpx.post(f"{url}/weights_checker", json={"action": "checksum"}, timeout=left_s)
        except httpx.HTTPError as error:
            raise EngineError(
                f"SGLang at {url} is up and does not answer /weights_checker within engine.start_timeout_s: {error!r}\n"
                f"{self.log_tail()}"
            ) from error
        if "received:" not in reply.text:
            raise EngineError(
                f"SGLang at {url} runs without the plugin in {SGLANG_SITE} ({reply.status_code}): it would compute other "
                "positions than the trainer. Look for `slime_cua` in its log; SGLANG_PLUGINS must not exclude it"
            )
        return url

    def _spawn(
        self,
        command: list[str],
        log: IO[bytes],
        environment: dict[str, str],
        extra_paths: tuple[str, ...] = (),
    ) -> None:
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *extra_paths, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )

    def _check_still_starting(self, deadline_s: float) -> None:
        process = self._process
        if process is None:
            raise EngineError("the engine was stopped while it started")
        code = process.poll()
        if code is not None:
            raise EngineError(f"the engine ended with code {code} at start:\n{self.log_tail()}")
        if time.monotonic() > deadline_s:
            raise EngineError(
                f"the engine was not ready in engine.start_timeout_s={self._config.start_timeout_s}:\n{self.log_tail()}"
            )

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        try:
            lines = self._log_path.read_text(errors="replace").splitlines()
        except OSError:
            return f"(no log at {self._log_path})"
        return "\n".join(lines[-_LOG_TAIL_LINES:])
