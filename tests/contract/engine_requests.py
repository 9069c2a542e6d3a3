"""Requests that the contract tests send."""

from __future__ import annotations

import base64
import functools
import io
import json
import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from slime_cua.data.expand import ImageProcessorConfig


def png(seed: int, width: int = 640, height: int = 384) -> bytes:
    """A PNG of coarse noise."""
    small = np.random.default_rng(seed).integers(0, 255, (12, 20, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST).save(file, "png")
    return file.getvalue()


def text_ids(seed: int, count: int) -> list[int]:
    """Ids of plain text tokens (any byte-level vocabulary has them here)."""
    return np.random.default_rng(seed).integers(24, 264, count).tolist()


@functools.cache
def processor_of(url: str) -> ImageProcessorConfig:
    """The image processor of the model that `url` serves."""
    return ImageProcessorConfig.from_hf(Path(httpx.get(f"{url}/model_info").json()["model_path"]))


@functools.cache
def shown(url: str) -> tuple[int, ...]:
    """An image in a prompt of the model that `url` serves, as chat templates write it: a placeholder between its marks.

    Without the marks SGLang takes a placeholder for text.
    """
    folder = Path(httpx.get(f"{url}/model_info").json()["model_path"])
    config = json.loads((folder / "config.json").read_text())
    return tuple(config[name] for name in ("vision_start_token_id", "image_token_id", "vision_end_token_id"))


def flush(url: str) -> None:
    """Empty the prefix cache, once the step in flight is over."""
    httpx.post(f"{url}/flush_cache", params={"timeout": 30}, timeout=60).raise_for_status()


def body(ids: list[int], images: list[bytes] | None = None, **sampling: Any) -> dict[str, Any]:
    """A /generate body that samples 8 tokens unless told otherwise."""
    params = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True, **sampling}
    request: dict[str, Any] = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
    if images:
        request["image_data"] = [base64.b64encode(image).decode() for image in images]
    return request


def generate(url: str, ids: list[int], images: list[bytes] | None = None, **sampling: Any) -> dict[str, Any]:
    """The decoded answer; asserts status 200."""
    reply = httpx.post(f"{url}/generate", json=body(ids, images, **sampling), timeout=60)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def logps(answer: dict[str, Any]) -> list[float]:
    """Log-probs of the output tokens."""
    return [triple[0] for triple in answer["meta_info"]["output_token_logprobs"]]


def noise(url: str) -> float:
    """How far log-probs of equal requests may differ: rounding of fp32 in the embedded engine, of bf16 in SGLang."""
    return 0.02 if url == os.environ.get("SLIME_CUA_SGLANG_URL") else 2e-4


def post(url: str, path: str, **fields: Any) -> httpx.Response:
    """A control request."""
    return httpx.post(f"{url}{path}", json=fields, timeout=60)
