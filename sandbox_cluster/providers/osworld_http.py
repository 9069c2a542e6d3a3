"""OSWorld's control server as its caller: the calls a driver needs, each sent once, failures named."""

from __future__ import annotations

import base64
import json
import math
import time
import uuid
from collections.abc import AsyncIterable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import sandbox_cluster.guest as guest_package
from sandbox_cluster.providers.base import DEFAULT_FILE_BYTES, Platform
from sandbox_cluster.wire import NotSentError, Reply, Wire
from slime_cua.core.errors import SandboxError, UnknownOutcomeError

CALL_S = 20.0
PATIENCE_S = 60.0
"""One /execute call lasts at most so long: the server itself gives up at 120 s, its own clients at 90 s."""
SKEW_TRIES, SKEW_BOUNDS_S = 4, 0.5
_INLINE_CHARS = 12_000
"""A longer request travels as a file: Windows takes 32,767 characters a command line, this program included."""
_PYTHON = "python"


def _program() -> str:
    """guest/supervise.py as text for `python -c`; it knows itself as SOURCE, to be started again."""
    text = (Path(guest_package.__file__).parent / "supervise.py").read_text()
    return f"SOURCE = {text[text.index('import base64') :]!r}\nexec(SOURCE)"


class ControlServer:
    """One control server. Raises SandboxError when it does not answer as it should; its `url` has no trailing slash."""

    def __init__(self, url: str, platform: Platform) -> None:
        self.url, self.platform = url.rstrip("/"), platform
        self._wire = Wire()
        self._program = _program()

    async def close(self) -> None:
        await self._wire.close()

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | AsyncIterable[bytes] = b"",
        kind: str = "",
        timeout_s: float = CALL_S,
        size: int = 0,
    ) -> Reply:
        """One request, sent once. Raises SandboxError: not sent, or UnknownOutcomeError: sent, no answer.

        size: of a body that comes in parts.
        """
        headers = {"content-type": kind} if kind else {}
        if size:
            headers["content-length"] = str(size)
        try:
            return await self._wire.request(method, self.url + path, body, headers, timeout_s)
        except UnknownOutcomeError as error:
            raise UnknownOutcomeError(f"{self.url}{path} did not answer: {error}") from None
        except NotSentError as error:
            raise SandboxError(f"{self.url} cannot be reached: {error}") from None

    async def screenshot(self, timeout_s: float = CALL_S) -> bytes:
        """The picture as it came."""
        reply = await self.call("GET", "/screenshot", timeout_s=timeout_s)
        if reply.status != 200:
            raise SandboxError(f"{self.url}/screenshot answered {reply.status}")
        return reply.content

    async def screen_wh_px(self) -> tuple[int, int]:
        body = await self._json("POST", "/screen_size")
        try:
            return int(body["width"]), int(body["height"])
        except (KeyError, TypeError, ValueError):
            raise SandboxError(f"{self.url}/screen_size answered {str(body)[:200]}") from None

    async def execute(self, argv: list[str], timeout_s: float = CALL_S) -> dict[str, Any]:
        """POST /execute of a program. SandboxError when the server did not run it."""
        body = json.dumps({"command": argv, "shell": False}).encode()
        reply = await self._json("POST", "/execute", body, "application/json", timeout_s)
        if reply.get("status") != "success":
            raise SandboxError(f"{self.url}/execute failed: {str(reply.get('message', reply))[:500]}")
        return reply

    async def supervised(self, request: dict[str, Any], timeout_s: float = CALL_S) -> dict[str, Any]:
        """One operation of guest/supervise.py. OSError as the desktop gave it."""
        text = base64.b64encode(json.dumps(request).encode()).decode()
        if len(text) > _INLINE_CHARS:
            place = f"/tmp/request-{uuid.uuid4().hex}"
            if self.platform.is_windows:
                place = f"{self.platform.home}\\request-{uuid.uuid4().hex}"
            await self.upload(place, json.dumps(request).encode())
            text = "@" + place
        reply = await self.execute([_PYTHON, "-c", self._program, text], timeout_s)
        try:
            answer: dict[str, Any] = json.loads(reply["output"])
        except (ValueError, KeyError, TypeError):
            said = str(reply.get("error") or reply.get("output"))[-500:]
            raise SandboxError(f"the program that watches over others failed on {self.url}: {said}") from None
        if "errno" in answer:
            raise OSError(int(answer["errno"]), str(answer["error"]), request.get("path"))
        return answer

    async def upload(self, path: str, data: bytes) -> None:
        """POST /setup/upload; the parent folder must be there."""
        mark = uuid.uuid4().hex
        body = (
            f'--{mark}\r\ncontent-disposition: form-data; name="file_path"\r\n\r\n{path}\r\n--{mark}\r\n'
            'content-disposition: form-data; name="file_data"; filename="data"\r\n'
            "content-type: application/octet-stream\r\n\r\n"
        ).encode() + data
        kind = f"multipart/form-data; boundary={mark}"
        reply = await self.call(
            "POST", "/setup/upload", body + f"\r\n--{mark}--\r\n".encode(), kind, timeout_s=120.0
        )
        if reply.status != 200:
            raise OSError(5, f"upload failed with {reply.status}: {reply.content[:200]!r}", path)

    async def download(self, path: str, max_bytes: int = DEFAULT_FILE_BYTES) -> bytes:
        """POST /file."""
        body = urlencode({"file_path": path}).encode()
        reply = await self.call("POST", "/file", body, "application/x-www-form-urlencoded", timeout_s=120.0)
        if reply.status == 404:
            raise FileNotFoundError(2, "No such file or directory", path)
        if reply.status != 200:
            raise SandboxError(f"{self.url}/file answered {reply.status}")
        return reply.content

    async def clock_skew_s(self) -> tuple[float, float]:
        """Bounds of the desktop's clock less ours: it was read between the start and the end of a call. Slow calls say little, so
        up to SKEW_TRIES are made until the bounds are close."""
        low, high = -math.inf, math.inf
        for _ in range(SKEW_TRIES):
            before = time.time()
            now = float((await self.supervised({"op": "time"}))["now"])
            low, high = max(low, now - time.time()), min(high, now - before)
            if high - low <= SKEW_BOUNDS_S:
                break
        return low, high

    async def has_broken_bash(self) -> bool:
        """Whether /run_bash_script is missing, or runs a script and then fails over its own logging (`_append_event`)."""
        body = json.dumps({"script": "true", "timeout": 10}).encode()
        reply = await self.call("POST", "/run_bash_script", body, "application/json")
        return reply.status != 200

    async def _json(
        self, method: str, path: str, body: bytes = b"", kind: str = "", timeout_s: float = CALL_S
    ) -> dict[str, Any]:
        reply = await self.call(method, path, body, kind, timeout_s)
        try:
            value = json.loads(reply.content)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise SandboxError(f"{self.url}{path} answered {reply.status}: {reply.content[:200]!r}")
        return value
