"""New weights from the trainer to every policy server, whole or not at all.

Order, the same for every way: pause (abort: running requests end with what they have) -> flush -> transfer -> check count
and checksum -> set the version -> continue. An engine that fails anywhere is left paused and named in the report: it must
not get traffic until a later publish or a restart gave it the current weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from slime_cua.convert.weight_stream import (
    NamedTensor,
    WeightGroup,
    buckets,
    combined_digest,
    dtype_name,
)
from slime_cua.core.ports import free_port
from slime_cua.trainer.publish_report import PublishReport
from slime_cua.trainer.publish_round import PublishRound, Sent, write_version
from slime_cua.trainer.shared_tensors import in_one_buffer, shared_payload

RECEIVED = "received:"
"""Under this prefix the plugin in `rollout/engines/sglang_site` gives out what an SGLang engine received."""
FLUSH_TIMEOUT_S = 10.0
"""A server that overlaps its steps has one in flight when the last aborted request was answered, and refuses to flush at once."""
PROBE_IDS = tuple(range(24, 64))
"""A prompt of our own: after an update its first request must find nothing in the prefix cache."""


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


class _Publisher:
    """The order of a publish; the ways differ in `_transfer`."""

    def __init__(self, *, dtype: torch.dtype | None, timeout_s: float, probe_timeout_s: float = 3.0) -> None:
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._probe_timeout_s = probe_timeout_s

    def publish(
        self, tensors: Iterable[NamedTensor], version: int, engine_urls: Sequence[str]
    ) -> PublishReport:
        sent = Sent()
        stream = sent.note(tensors, self._dtype)
        turn = PublishRound(engine_urls, version, self._timeout_s)
        try:
            self._before(stream, turn)
            self._probe(turn)
            began_s = time.monotonic()
            turn.post_all("pause", "/pause_generation", {"mode": "abort"})
            turn.post_all("flush", f"/flush_cache?timeout={FLUSH_TIMEOUT_S:g}")
            with turn.phase("transfer"):
                self._transfer(stream, turn)
                for _ in stream:
                    pass
            self._check(turn, sent)
            turn.post_all(
                "version",
                "/update_weight_version",
                # requests that came during the pause have no token yet: they wait for `continue`, and need not be sent again
                {"new_version": str(version), "abort_all_requests": False},
            )
            turn.post_all("continue", "/continue_generation")
            turn.seconds["paused"] = time.monotonic() - began_s
            self._check_probe(turn)
            self._after(turn)
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

    def _before(self, stream: Iterator[NamedTensor], turn: PublishRound) -> None:
        """Work that needs no pause."""

    def _transfer(self, stream: Iterator[NamedTensor], turn: PublishRound) -> None:
        raise NotImplementedError

    def _after(self, turn: PublishRound) -> None:
        """Work that engines need not wait for."""

    def _folder(self, version: int) -> Path | None:
        return None

    def _check(self, turn: PublishRound, sent: Sent) -> None:
        """Every engine holds exactly what was sent: by name, the tensors as each of its ranks received them. SGLang's own
        checksums are of its sharded layout: there engines must agree with each other."""
        layouts: dict[str, list[str]] = {}
        for url, answer in turn.post_all("check", "/weights_checker", {"action": "checksum"}).items():
            payload = answer.get("payload") or {k: v for k, v in answer.items() if k != "message"}
            held = [payload["checksums"]] if "algorithm" in payload else _take_received(payload)
            fault = next(filter(None, (_first_difference(sent.digests, digests) for digests in held)), "")
            if fault:
                turn.drop(url, f"check: {fault}")
            elif "algorithm" not in payload:
                layouts.setdefault(json.dumps(payload, sort_keys=True), []).append(url)
        if len(layouts) > 1:
            majority = max(layouts.values(), key=len)
            for urls in layouts.values():
                for url in urls if urls is not majority else ():
                    turn.drop(url, f"check: its weights differ from those of {majority[0]}")

    def _probe(self, turn: PublishRound) -> dict[str, Any]:
        body = {
            "input_ids": list(PROBE_IDS),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        }
        with turn.phase("probe"):
            answers = turn.ask_all("/generate", body, self._probe_timeout_s)
        return {url: answer["meta_info"] for url, answer in answers.items() if "meta_info" in answer}

    def _check_probe(self, turn: PublishRound) -> None:
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

    def _before(self, stream: Iterator[NamedTensor], turn: PublishRound) -> None:
        with turn.phase("write"):
            write_version(self._root, turn.version, buckets(stream, self._shard_bytes), keep=self._keep)

    def _transfer(self, stream: Iterator[NamedTensor], turn: PublishRound) -> None:
        body = {"model_path": str(self._root / f"v{turn.version}"), "flush_cache": True}
        turn.gather("transfer", turn.start_all("/update_weights_from_disk", dict.fromkeys(turn.urls, body)))

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
        keep_folder: Path | None = None,
    ) -> None:
        """`keep_folder`: also keep the last two versions there, written after engines go on, so that a restarted engine
        need not wait for the next publish. Holds a copy of the weights in memory meanwhile: for small models."""
        super().__init__(dtype=dtype, timeout_s=timeout_s)
        self._keep_folder = keep_folder
        self._kept: list[NamedTensor] = []
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
        turn = PublishRound(members, 0, 5.0)
        try:
            calls = turn.start_all(
                "/destroy_weights_update_group", {url: {"group_name": self._name} for url in members}
            )
            group.close()
            turn.gather("close", calls)
        finally:
            turn.close()

    def _transfer(self, stream: Iterator[NamedTensor], turn: PublishRound) -> None:
        if tuple(turn.urls) != self._members:
            self.close()
            self._connect(turn)
        self._kept = []
        for bucket in buckets(stream, self._bucket_bytes):
            if self._keep_folder is not None:
                self._kept.extend((name, tensor.cpu().clone()) for name, tensor in bucket)
            if self._group is not None:
                self._send(bucket, turn)

    def _after(self, turn: PublishRound) -> None:
        kept, self._kept = self._kept, []
        if self._keep_folder is not None:
            with turn.phase("write"):
                write_version(self._keep_folder, turn.version, buckets(kept, 4 << 30), keep=2)

    def _folder(self, version: int) -> Path | None:
        return self._keep_folder / f"v{version}" if self._keep_folder is not None else None

    def _connect(self, turn: PublishRound) -> None:
        members = tuple(turn.urls)
        if not members:
            return
        self._name = f"weights-{time.time_ns()}"
        port, world_size = free_port(self._address), 1 + self._engine_tp * len(members)
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

    def _send(self, bucket: list[NamedTensor], turn: PublishRound) -> None:
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

    def _fail_all(self, turn: PublishRound, reason: str) -> None:
        """The group is broken: leave it, so that engines stop waiting, and give up on its members for this round."""
        group, self._group, members, self._members = self._group, None, self._members, ()
        if group is not None:
            group.close()
        for url in members or tuple(turn.urls):
            turn.drop(url, reason)


class IpcPublisher(_Publisher):
    """For engines on the trainer's own GPUs: each bucket lies in one buffer of the trainer's, engines map it and copy.

    SGLang only (/update_weights_from_tensor). The trainer's process must see the same GPU as the engine, and its allocator
    must not use expandable segments. With tensor parallelism every rank of the engine maps the same buffer and takes its share.
    """

    def __init__(
        self,
        *,
        device: str = "cuda",
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 1 << 30,
        engine_tp: int = 1,
        timeout_s: float = 120.0,
    ) -> None:
        super().__init__(dtype=dtype, timeout_s=timeout_s)
        self._device = torch.device(device)
        self._bucket_bytes = bucket_bytes
        self._engine_tp = engine_tp

    def _transfer(self, stream: Iterator[NamedTensor], turn: PublishRound) -> None:
        for bucket in buckets(stream, self._bucket_bytes):
            shared = in_one_buffer(bucket, self._device)
            body = {
                "serialized_named_tensors": [shared_payload(shared)] * self._engine_tp,
                "flush_cache": False,
            }
            turn.gather(
                "transfer", turn.start_all("/update_weights_from_tensor", dict.fromkeys(turn.urls, body))
            )


def _first_difference(sent: Mapping[str, str], held: Mapping[str, str]) -> str:
    """An empty digest stands for a tensor that the engine read at its start: it must be sent, whatever it held."""
    for name, digest in held.items():
        if name not in sent:
            return f"the engine's tensor {name} was not sent ({len(sent)} sent, {len(held)} held)"
        if sent[name] != digest:
            return f"tensor {name} differs from what was sent" if digest else f"tensor {name} did not arrive"
    missing = sent.keys() - held.keys() if held else ()
    return f"tensor {min(missing)} did not arrive" if missing else ""


def _take_received(payload: dict[str, Any]) -> list[dict[str, str]]:
    """Digests of what each rank of an SGLang engine received, as its plugin notes them, taken out of `payload`.

    Multi-token-prediction weights, which checkpoints hold and trainers do not train, are passed over.
    """
    found = []
    for rank in payload.get("ranks", ()):
        received = {name for name in rank["checksums"] if name.startswith(RECEIVED)}
        digests = {name.removeprefix(RECEIVED): rank["checksums"].pop(name) for name in received}
        found.append(
            {name: digest for name, digest in digests.items() if digest or not name.startswith("mtp.")}
        )
    return found
