"""What `bench_rollout.py` measures besides throughput: the contract suite, the log-prob gap to transformers, a publish."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.engines.client import EngineClient, Generation
from slime_cua.config.rollout import SamplingConfig
from slime_cua.core.errors import EngineError
from slime_cua.core.types import TrainSample
from slime_cua.data.expand import ImageProcessorConfig, expand_image_placeholders
from slime_cua.launch.canary import Images, Prompt, canary_prompts, compare

NEW_TOKENS = 32
MAX_ROUNDS = 100
P2P_BYTES = 1 << 30


def contract(url: str, timeout_s: float) -> dict[str, Any]:
    """The last line of the contract suite against the server at `url`, and whether all of it passed."""
    suite = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/contract/test_engine_http.py",
    ]
    root = Path(__file__).resolve().parents[1]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "SLIME_CUA_SGLANG_URL": url, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        ran = subprocess.run(
            [*suite, "-k", "sglang", "-Wdefault"],  # packages of GPU sets warn at import
            cwd=root,
            env=environment,
            timeout=timeout_s,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return {"passed": False, "summary": f"no end within {timeout_s:g} s"}
    lines = ran.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "passed": ran.returncode == 0,
        "summary": lines[-1] if lines else ran.stderr[-300:],
        "failed": failed,
    }


def gap(url: str, model: Path, num_tokens: int, device: str, dtype: str, timeout_s: float) -> dict[str, Any]:
    """|log-prob engine - log-prob transformers| over at least `num_tokens` sampled tokens, half of them after a screenshot."""
    processor = ImageProcessorConfig.from_hf(model)
    prompts = canary_prompts(model, processor.image_token_id, max(1, -(-num_tokens // (2 * NEW_TOKENS))))
    pairs = asyncio.run(_answers(url, processor, prompts, num_tokens // 2, timeout_s))
    asked, answers = [prompt for prompt, _ in pairs], [answer for _, answer in pairs]
    gaps = compare(asked, answers, Transformers(model, device, dtype))
    everything = {
        kind: {"num_tokens": g.num_tokens, "mean": g.mean, "p99": g.p99, "max": g.max}
        for kind, g in gaps.items()
    }
    return {"device": device, "dtype": dtype, **everything}


async def _answers(
    url: str, processor: ImageProcessorConfig, prompts: Sequence[Prompt], num_tokens: int, timeout_s: float
) -> list[tuple[Prompt, Generation]]:
    """Answers until each kind of prompt has `num_tokens`; no seed comes twice. Raises EngineError when they do not come."""
    sampling = SamplingConfig(temperature=1.0, max_response_tokens=NEW_TOKENS)
    found: list[tuple[Prompt, Generation]] = []
    left = {"text": num_tokens, "image": num_tokens}
    async with EngineClient([url], processor, request_timeout_s=timeout_s) as client:
        for turn in range(MAX_ROUNDS):
            wanted = [prompt for prompt in prompts if left[prompt.kind] > 0]
            if not wanted:
                return found
            calls = [
                client.generate(
                    prompt.ids, prompt.images, sampling, session=f"gap-{turn}-{n}", seed=1000 * turn + n
                )
                for n, prompt in enumerate(wanted)
            ]
            for prompt, answer in zip(wanted, await asyncio.gather(*calls), strict=True):
                found.append((prompt, client.without_placeholder(answer)))
                left[prompt.kind] -= len(found[-1][1].ids)
    raise EngineError(f"{MAX_ROUNDS} rounds of prompts gave too few tokens: {left} are missing")


class Transformers:
    """`slime_cua.launch.canary.TrainerLogprobs` by one plain forward a sample."""

    def __init__(self, folder: Path, device: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessorPil

        self._torch, self._device = torch, device
        self._config = ImageProcessorConfig.from_hf(folder)
        kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=kind).eval().to(device)
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def __call__(self, samples: Sequence[TrainSample], images: Images) -> list[list[float]]:
        with self._torch.no_grad():
            return [self._one(one, images) for one in samples]

    def _one(self, one: TrainSample, images: Images) -> list[float]:
        from PIL import Image

        segment = one.segment
        ids = expand_image_placeholders(segment.token_ids, segment.images, self._config)
        row = self._torch.tensor([ids], device=self._device)
        inputs: dict[str, Any] = {"input_ids": row}
        if segment.images:
            pictures = [Image.open(io.BytesIO(images.get(ref))).convert("RGB") for ref in segment.images]
            inputs |= dict(self._processor(images=pictures, return_tensors="pt").to(self._device))
            inputs["mm_token_type_ids"] = (row == self._config.image_token_id).int()
        num = sum(segment.is_trained)
        logits = self._model(**inputs).logits[0, -num - 1 : -1].float()
        logp = logits.log_softmax(-1).gather(-1, row[0, -num:, None])[:, 0]
        return [float(value) for value in logp.cpu()]


def publish(
    url: str,
    model: Path,
    *,
    way: str,
    device: str,
    engine_device: str,
    bucket_mb: int,
    tp: int,
    timeout_s: float,
    folder: Path,
) -> dict[str, Any]:
    """Three publishes of the folder's own weights from `device`: the pause and the rate of each, and the link's own rate.

    The first one makes the broadcast group. engine_device: where the engine is, for the peer-to-peer rate.
    """
    import torch

    from slime_cua.config.rollout import PublishConfig
    from slime_cua.trainer.publish_ways import PublishPlan, make_publisher

    held = dict(_tensors(model, device))
    plan = PublishPlan(
        config=PublishConfig(way=way, bucket_mb=bucket_mb),  # type: ignore[arg-type]
        use_gpu=device.startswith("cuda"),
        engine_tp=tp,
        folder=folder,
    )
    publisher = make_publisher(plan, "127.0.0.1", timeout_s)
    rounds = []
    try:
        for version in range(1, 4):
            report = publisher.publish(held.items(), version, [url])
            if not report.engines:
                return {"way": way, "failed": dict(report.failures)}
            seconds = {name: round(value, 4) for name, value in report.seconds.items()}
            rate = report.num_bytes / max(report.seconds.get("transfer", 0.0), 1e-9) / 1e9
            rounds.append({"seconds": seconds, "transfer_gb_per_s": rate})
    finally:
        publisher.close()
    num_gb = report.num_bytes / 1e9
    found: dict[str, Any] = {
        "way": way,
        "num_gb": num_gb,
        "rounds": rounds,
        "paused_s": rounds[-1]["seconds"]["paused"],
    }
    found["paused_goal_s"] = 1.0 + 0.1 * num_gb
    if torch.cuda.is_available() and torch.cuda.device_count() > 1 and engine_device != device:
        found["peer_to_peer_gb_per_s"] = peer_to_peer(device, engine_device)
        found["share_of_peer_to_peer"] = rounds[-1]["transfer_gb_per_s"] / found["peer_to_peer_gb_per_s"]
    return found


def peer_to_peer(source: str, target: str) -> float:
    """GB/s of copying a gibibyte from one GPU to the other, the best of ten."""
    import torch

    here, there = (torch.empty(P2P_BYTES, dtype=torch.uint8, device=device) for device in (source, target))
    best = 0.0
    for _ in range(10):
        torch.cuda.synchronize(source)
        began = time.perf_counter()
        there.copy_(here)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        best = max(best, P2P_BYTES / (time.perf_counter() - began) / 1e9)
    return best


def _tensors(model: Path, device: str) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt", device=device) as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def goals(found: dict[str, Any]) -> list[str]:
    """A line for each goal that was measured: the figure, the goal, and whether it is met."""
    lines = []

    def line(what: str, value: float, goal: float, is_most: bool) -> None:
        is_met = bool(np.isfinite(value)) and (value <= goal if is_most else value >= goal)
        lines.append(
            f"{'ok  ' if is_met else 'MISS'} {what}: {value:.4g} (goal {'<=' if is_most else '>='} {goal:.4g})"
        )

    if "contract" in found:
        lines.append(
            f"{'ok  ' if found['contract']['passed'] else 'MISS'} contract suite: {found['contract']['summary']}"
        )
    for kind in ("text", "image"):
        if "gap" in found:
            line(f"mean log-prob gap, {kind}", found["gap"][kind]["mean"], 0.025, True)
            line(f"p99 log-prob gap, {kind}", found["gap"][kind]["p99"], 0.2, True)
    if "publish" in found:
        if "failed" in found["publish"]:
            lines.append(f"MISS publish: {found['publish']['failed']}")
        else:
            line(
                "pause of a publish, s", found["publish"]["paused_s"], found["publish"]["paused_goal_s"], True
            )
        if "share_of_peer_to_peer" in found["publish"]:
            line("share of peer-to-peer bandwidth", found["publish"]["share_of_peer_to_peer"], 0.6, False)
    if "episodes" in found:
        line(
            "served tokens/s against stateless", found["episodes"]["ratio"]["served_tokens_per_s"], 2.0, False
        )
    return lines
