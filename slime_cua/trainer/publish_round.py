"""One publish in the making: the calls to engines, who is still in, what left the trainer, the folder it may leave."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from slime_cua.convert.weight_stream import NamedTensor, tensor_digest
from slime_cua.core.errors import CheckpointError, EngineError
from slime_cua.core.files import fsync_folder, write_atomic


@dataclass
class Sent:
    """What left the trainer so far."""

    digests: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0

    def note(self, tensors: Iterable[NamedTensor], dtype: torch.dtype | None) -> Iterator[NamedTensor]:
        for name, tensor in tensors:
            if name in self.digests:
                raise CheckpointError(f"tensor {name} came twice from the trainer")
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            if not torch.isfinite(tensor).all():
                raise CheckpointError(
                    f"tensor {name} holds NaN or infinity: the trainer's weights are broken, not published"
                )
            self.digests[name] = tensor_digest(tensor)
            self.num_bytes += tensor.nbytes
            yield name, tensor.detach().contiguous()


class PublishRound:
    """One publish over HTTP: who is still in, what failed, how long each phase took."""

    def __init__(self, urls: Sequence[str], version: int, timeout_s: float) -> None:
        self.urls = list(urls)
        self.version = version
        self.failures: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self._timeout_s = timeout_s
        self._http = httpx.Client()
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(urls)), thread_name_prefix="publish")

    def close(self) -> None:
        self._pool.shutdown()
        self._http.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began_s

    def post_all(self, name: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """POST to every engine that is still in; engines that fail are out. URL -> decoded answer."""
        with self.phase(name):
            return self.gather(name, self.start_all(path, {url: body or {} for url in self.urls}))

    def start_all(
        self, path: str, bodies: Mapping[str, Mapping[str, Any]], timeout_s: float | None = None
    ) -> dict[str, Future[Any]]:
        """Begin a POST to each URL; `gather` waits for them."""
        return {
            url: self._pool.submit(self._post, url, path, body, timeout_s) for url, body in bodies.items()
        }

    def ask_all(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """POST to every engine that is still in; those that do not answer in time stay in."""
        answers = {}
        for url, call in self.start_all(path, dict.fromkeys(self.urls, body), timeout_s).items():
            with suppress(httpx.HTTPError, EngineError):
                answers[url] = call.result()
        return answers

    def gather(self, name: str, calls: Mapping[str, Future[Any]]) -> dict[str, Any]:
        answers = {}
        for url, call in calls.items():
            try:
                answers[url] = call.result()
            except (httpx.HTTPError, EngineError) as error:
                self.drop(url, f"{name}: {error}")
        return answers

    def drop(self, url: str, reason: str) -> None:
        """`url` is out of this round."""
        self.failures.setdefault(url, reason)
        if url in self.urls:
            self.urls.remove(url)

    def _post(self, url: str, path: str, body: Mapping[str, Any], timeout_s: float | None) -> Any:
        reply = self._http.post(f"{url}{path}", json=body, timeout=timeout_s or self._timeout_s)
        if reply.status_code != 200:
            raise EngineError(f"{path} answered {reply.status_code}: {reply.text[:500]}")
        try:
            answer = reply.json()
        except ValueError:
            return reply.text
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{path}: {answer.get('message')}")
        return answer


def write_version(root: Path, version: int, shards: Iterable[list[NamedTensor]], *, keep: int) -> Path:
    """Write root/v<version> (safetensors and index) whole or not at all; all but the `keep` last written go."""
    final, partial = root / f"v{version}", root / f".v{version}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        name = f"model-{index:05d}.safetensors"
        save_file({key: tensor.cpu() for key, tensor in shard}, partial / name, {"format": "pt"})
        weight_map.update({key: name for key, _ in shard})
    content = json.dumps({"metadata": {}, "weight_map": weight_map})
    write_atomic(partial / "model.safetensors.index.json", content.encode())
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    fsync_folder(root)
    written = sorted(root.glob("v*"), key=lambda path: path.stat().st_mtime_ns)
    for old in written[:-keep]:
        if old != final:
            shutil.rmtree(old, ignore_errors=True)
    return final
