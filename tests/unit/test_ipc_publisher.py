"""Weights handed over in the sender's memory: what is sent, in which order, and what an SGLang engine's answer decides."""

from __future__ import annotations

import asyncio
import base64
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import uvicorn
from fastapi import FastAPI, Request

from slime_cua.convert.weight_stream import tensor_digest
from slime_cua.core.ports import free_port
from slime_cua.trainer.publisher import IpcPublisher
from slime_cua.trainer.shared_tensors import in_one_buffer, with_uuid

WEIGHTS = {
    "embed": torch.arange(7, dtype=torch.bfloat16),
    "layer": torch.randn(3, 5),
    "head": torch.randn(4, 4, dtype=torch.bfloat16),
}


class FakeSglang:
    """Keeps what a server with the plugin would: digests of received tensors beside checksums of its own layout."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.received: dict[str, torch.Tensor] = {}
        self.known_at_start = {*WEIGHTS, "mtp.extra"}
        self.loses = ""
        self.version = "0"
        self.app = FastAPI()
        self.app.post("/{path}")(self.answer)

    async def answer(self, path: str, request: Request) -> Any:
        raw = await request.body()
        body = await request.json() if raw else {}
        self.calls.append(path)
        if path == "update_weights_from_tensor":
            (payload,) = body["serialized_named_tensors"]
            assert body["flush_cache"] is False
            self.received |= {
                name: tensor.clone()
                for name, tensor in pickle.loads(base64.b64decode(payload))
                if name != self.loses
            }
        if path == "update_weight_version":
            self.version = body["new_version"]
        if path == "weights_checker":
            digests = dict.fromkeys(self.known_at_start, "") | {
                name: tensor_digest(tensor) for name, tensor in self.received.items()
            }
            checksums = {"qkv": "1", **{f"received:{name}": digest for name, digest in digests.items()}}
            return {"success": True, "ranks": [{"checksums": checksums, "per_gpu_checksum": "2"}]}
        if path == "generate":
            return {"meta_info": {"cached_tokens": 0, "weight_version": self.version}}
        return {"success": True}


@pytest.fixture
def sglang() -> Iterator[tuple[FakeSglang, str]]:
    fake, port = FakeSglang(), free_port()
    server = uvicorn.Server(uvicorn.Config(fake.app, port=port, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline, "the double did not start"
        time.sleep(0.01)
    yield fake, f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(timeout=30)


def publisher() -> IpcPublisher:
    return IpcPublisher(device="cpu", bucket_bytes=64, timeout_s=60)


def test_tensors_arrive_bit_for_bit_in_buckets_between_pause_and_continue(
    sglang: tuple[FakeSglang, str],
) -> None:
    fake, url = sglang
    report = publisher().publish(WEIGHTS.items(), 4, [url])
    assert report.failures == {} and report.engines == (url,) and report.num_tensors == len(WEIGHTS)
    assert fake.received.keys() == WEIGHTS.keys()
    assert all(torch.equal(fake.received[name], tensor) for name, tensor in WEIGHTS.items())
    order = [call for call in fake.calls if call != "generate"]
    assert order.count("update_weights_from_tensor") > 1
    assert list(dict.fromkeys(order)) == [
        "pause_generation",
        "flush_cache",
        "update_weights_from_tensor",
        "weights_checker",
        "update_weight_version",
        "continue_generation",
    ]


@pytest.mark.parametrize("fault", ["lost", "too few"])
def test_an_engine_that_did_not_get_everything_stays_paused(
    fault: str, sglang: tuple[FakeSglang, str]
) -> None:
    fake, url = sglang
    sent = dict(WEIGHTS)
    if fault == "lost":
        fake.loses = "layer"
    else:
        del sent["layer"]
    report = publisher().publish(sent.items(), 4, [url])
    assert report.engines == () and "layer" in report.failures[url]
    assert "continue_generation" not in fake.calls and "update_weight_version" not in fake.calls


def test_one_buffer_holds_all_and_each_view_is_aligned() -> None:
    views = in_one_buffer(list(WEIGHTS.items()), torch.device("cpu"))
    assert len({view.untyped_storage().data_ptr() for _, view in views}) == 1
    assert all(view.storage_offset() * view.itemsize % 256 == 0 for _, view in views)
    assert all(torch.equal(view, WEIGHTS[name]) for name, view in views)


def test_the_device_travels_by_uuid() -> None:
    arguments = ("cls", "size", "stride", 0, "storage", torch.float32, 0, b"handle")
    assert with_uuid(arguments, "GPU-1")[6] == "GPU-1"
    with pytest.raises(TypeError, match="another order"):
        with_uuid(("cls", "size", "stride", 0, "storage", torch.float32, "x"), "GPU-1")
