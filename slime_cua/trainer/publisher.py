"""New weights from the trainer to every policy server, whole or not at all.

Order, the same for every way: pause (abort: running requests end with what they have) -> flush -> transfer -> check count
and checksum -> set the version -> continue. An engine that fails anywhere is left paused and named in the report: it must
not get traffic until a later publish or a restart gave it the current weights.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from safetensors.torch import save_file

from slime_cua.convert.weight_stream import (
    NamedTensor,
    WeightGroup,
    buckets,
    combined_digest,
    dtype_name,
    tensor_digest,
)
from slime_cua.core.errors import CheckpointError, EngineError
from slime_cua.core.files import fsync_folder, write_atomic

PROBE_IDS = tuple(range(24, 64))
"""A prompt of our own: after an update its first request must find nothing in the prefix cache."""


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
    """Per phase: write (disk only), pause, flush, transfer, check, version, continue, probe; `paused` is the time from the
    first pause to the last continue."""
    folder: Path | None = None
    """Checkpoint folder of this version, when the way makes one."""


class WeightPublisher(Protocol):
    """Brings the trainer's weights to engines."""

    def publish(
        self, tensors: Iterable[NamedTensor], version: int, engine_urls: Sequence[str]
    ) -> PublishReport:
        """Give every engine `tensors` (Hugging Face names, whole tensors) as `version`.

        Reads `tensors` once and to its end, also when all engines fail (other ranks may take part in making it). Raises
        CheckpointError when a tensor is not finite: no engine has changed its version then, but engines that were already
        paused stay so, for the run must end.
        """
        ...

    def close(self) -> None:
        """Leave groups, close connections."""
        ...


@dataclass
class _Sent:
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


class _Round:
    """One publish over HTTP: who is still in, what failed, how long each phase took."""

    def __init__(self, urls: Sequence[str], version: int, timeout_s: float) -> None:
        self.urls = list(urls)
        self.version = version
        self.failures: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self._http = httpx.Client(timeout=timeout_s)
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

    def start_all(self, path: str, bodies: Mapping[str, Mapping[str, Any]]) -> dict[str, Future[Any]]:
        return {url: self._pool.submit(self._post, url, path, body) for url, body in bodies.items()}

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

    def _post(self, url: str, path: str, body: Mapping[str, Any]) -> Any:
        reply = self._http.post(f"{url}{path}", json=body)
        if reply.status_code != 200:
            raise EngineError(f"{path} answered {reply.status_code}: {reply.text[:500]}")
        try:
            answer = reply.json()
        except ValueError:
            return reply.text
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{path}: {answer.get('message')}")
        return answer


class _Publisher:
    """The order of a publish; the ways differ in `_transfer`."""

    def __init__(self, *, dtype: torch.dtype | None, timeout_s: float, probe_timeout_s: float = 10.0) -> None:
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._probe_timeout_s = probe_timeout_s

    def publish(
        self, tensors: Iterable[NamedTensor], version: int, engine_urls: Sequence[str]
    ) -> PublishReport:
        sent = _Sent()
        stream = sent.note(tensors, self._dtype)
        turn = _Round(engine_urls, version, self._timeout_s)
        try:
            self._before(stream, turn)
            self._probe(turn)
            began_s = time.monotonic()
            turn.post_all("pause", "/pause_generation", {"mode": "abort"})
            turn.post_all("flush", "/flush_cache")
            with turn.phase("transfer"):
                self._transfer(stream, turn)
                for _ in stream:
                    pass
            self._check(turn, sent)
            turn.post_all(
                "version", "/update_weight_version", {"new_version": str(version), "abort_all_requests": True}
            )
            turn.post_all("continue", "/continue_generation")
            turn.seconds["paused"] = time.monotonic() - began_s
            self._check_probe(turn)
        finally:
            turn.close()
        return PublishReport(
            version,
            len(sent.digests),
            sent.num_bytes,
            combined_digest(sent.digests),
            tuple(turn.urls),
            turn.failures,
            turn.seconds,
            self._folder(version),
        )

    def close(self) -> None:
        """Nothing is held open."""

    def _before(self, stream: Iterator[NamedTensor], turn: _Round) -> None:
        """Work that needs no pause."""

    def _transfer(self, stream: Iterator[NamedTensor], turn: _Round) -> None:
        raise NotImplementedError

    def _folder(self, version: int) -> Path | None:
        return None

    def _check(self, turn: _Round, sent: _Sent) -> None:
        """Every engine holds exactly what was sent: by name where it digests whole tensors as we do; engines that digest
        their own sharded layout (SGLang) must agree with each other."""
        layouts: dict[str, list[str]] = {}
        for url, answer in turn.post_all("check", "/weights_checker", {"action": "checksum"}).items():
            payload = answer.get("payload") or {k: v for k, v in answer.items() if k != "message"}
            if "algorithm" in payload:
                fault = _first_difference(sent.digests, payload["checksums"])
                if fault:
                    turn.drop(url, f"check: {fault}")
            else:
                layouts.setdefault(json.dumps(payload, sort_keys=True), []).append(url)
        if len(layouts) > 1:
            majority = max(layouts.values(), key=len)
            for urls in layouts.values():
                for url in urls if urls is not majority else ():
                    turn.drop(url, f"check: its weights differ from those of {majority[0]}")

    def _probe(self, turn: _Round) -> dict[str, Any]:
        body = {
            "input_ids": list(PROBE_IDS),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        }
        answers: dict[str, Any] = {}
        with turn.phase("probe"), httpx.Client(timeout=self._probe_timeout_s) as http:
            for url in turn.urls:
                try:
                    answers[url] = http.post(f"{url}/generate", json=body).json()["meta_info"]
                except (httpx.HTTPError, ValueError, KeyError):
                    continue
        return answers

    def _check_probe(self, turn: _Round) -> None:
        """After the update nothing of the old weights is in the prefix cache. An engine too busy to answer passes."""
        for url, meta in self._probe(turn).items():
            if meta["cached_tokens"] or meta["weight_version"] != str(turn.version):
                turn.gather("probe", turn.start_all("/pause_generation", {url: {"mode": "abort"}}))
                turn.drop(
                    url,
                    f"probe: {meta['cached_tokens']} cached tokens and version {meta['weight_version']} after the update",
                )


class DiskPublisher(_Publisher):
    """Through a checkpoint folder that engines read: `folder`/v<version>. Written before the pause, kept for restarts."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        keep: int = 2,
        shard_bytes: int = 4 << 30,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(dtype=dtype, timeout_s=timeout_s)
        self._root = folder
        self._keep = keep
        self._shard_bytes = shard_bytes

    def _before(self, stream: Iterator[NamedTensor], turn: _Round) -> None:
        with turn.phase("write"):
            final = self._root / f"v{turn.version}"
            partial = self._root / f".v{turn.version}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            weight_map: dict[str, str] = {}
            for index, bucket in enumerate(buckets(stream, self._shard_bytes)):
                name = f"model-{index:05d}.safetensors"
                save_file({key: tensor.cpu() for key, tensor in bucket}, partial / name, {"format": "pt"})
                weight_map.update({key: name for key, _ in bucket})
            index_json = {"metadata": {}, "weight_map": weight_map}
            write_atomic(partial / "model.safetensors.index.json", json.dumps(index_json).encode())
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            fsync_folder(self._root)

    def _transfer(self, stream: Iterator[NamedTensor], turn: _Round) -> None:
        body = {"model_path": str(self._root / f"v{turn.version}"), "flush_cache": True}
        turn.gather("transfer", turn.start_all("/update_weights_from_disk", dict.fromkeys(turn.urls, body)))
        versions = sorted(int(path.name[1:]) for path in self._root.glob("v*") if path.name[1:].isdigit())
        for version in versions[: -self._keep]:
            shutil.rmtree(self._root / f"v{version}", ignore_errors=True)

    def _folder(self, version: int) -> Path | None:
        return self._root / f"v{version}"


class BroadcastPublisher(_Publisher):
    """Through a broadcast group of trainer rank 0 and all engines (gloo on CPU, nccl on GPU), in buckets.

    The group is made when the engines change and kept otherwise. When one receiver dies in the middle, the broadcast fails
    for all: every engine is in the report's failures, still paused, and a second publish to those alive mends it.
    """

    def __init__(
        self,
        *,
        backend: str = "gloo",
        address: str = "127.0.0.1",
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 512 << 20,
        engine_tp: int = 1,
        timeout_s: float = 120.0,
    ) -> None:
        super().__init__(dtype=dtype, timeout_s=timeout_s)
        self._backend = backend
        self._address = address
        self._device = torch.device(device)
        self._bucket_bytes = bucket_bytes
        self._engine_tp = engine_tp
        self._group: WeightGroup | None = None
        self._members: tuple[str, ...] = ()
        self._name = ""

    def close(self) -> None:
        """Leave the group, on both sides; engines that are gone are passed over."""
        group, members = self._group, self._members
        self._group, self._members = None, ()
        if group is None:
            return
        turn = _Round(members, 0, 5.0)
        try:
            calls = turn.start_all(
                "/destroy_weights_update_group", {url: {"group_name": self._name} for url in members}
            )
            group.close()
            turn.gather("close", calls)
        finally:
            turn.close()

    def _transfer(self, stream: Iterator[NamedTensor], turn: _Round) -> None:
        if tuple(turn.urls) != self._members:
            self.close()
            self._connect(turn)
        for bucket in buckets(stream, self._bucket_bytes):
            if self._group is None:
                continue
            self._send(bucket, turn)

    def _connect(self, turn: _Round) -> None:
        members = tuple(turn.urls)
        if not members:
            return
        self._name = f"weights-{time.time_ns()}"
        port, world_size = _free_port(self._address), 1 + self._engine_tp * len(members)
        bodies = {
            url: {
                "master_address": self._address,
                "master_port": port,
                "rank_offset": 1 + self._engine_tp * index,
                "world_size": world_size,
                "group_name": self._name,
                "backend": self._backend,
            }
            for index, url in enumerate(members)
        }
        calls = turn.start_all("/init_weights_update_group", bodies)
        try:
            self._group = WeightGroup.join(
                self._address, port, 0, world_size, self._name, self._backend, self._timeout_s
            )
            self._members = members
        except RuntimeError as error:
            self._fail_all(turn, f"connect: {error}")
        turn.gather("connect", calls)
        if turn.failures.keys() & set(members):
            self._fail_all(turn, "connect: another engine did not join")

    def _send(self, bucket: list[NamedTensor], turn: _Round) -> None:
        assert self._group is not None
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [dtype_name(tensor.dtype) for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            "flush_cache": False,
        }
        calls = turn.start_all("/update_weights_from_distributed", dict.fromkeys(self._members, body))
        try:
            self._group.broadcast([tensor.to(self._device) for _, tensor in bucket])
        except RuntimeError as error:
            self._fail_all(turn, f"transfer: the broadcast failed: {str(error).splitlines()[0]}")
        turn.gather("transfer", calls)

    def _fail_all(self, turn: _Round, reason: str) -> None:
        """The group is broken: leave it, so that engines stop waiting, and give up on its members for this round."""
        group, self._group, members, self._members = self._group, None, self._members, ()
        if group is not None:
            group.close()
        for url in members or tuple(turn.urls):
            turn.drop(url, reason)


def _first_difference(sent: Mapping[str, str], held: Mapping[str, str]) -> str:
    for name, digest in held.items():
        if name not in sent:
            return f"the engine's tensor {name} was not sent ({len(sent)} sent, {len(held)} held)"
        if sent[name] != digest:
            return f"tensor {name} differs from what was sent"
    return ""


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
