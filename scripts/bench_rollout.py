"""Measure a policy server: `python scripts/bench_rollout.py --model DIR --start sglang --python SGLANG/bin/python`.

Starts the server (or takes `--url`), measures the parts of `--parts` one after the other, and prints JSON and a line for each
goal of docs/rollout.md. On two GPUs: `--trainer-device cuda:0 --engine-gpus 1`. A first try without a GPU:
`--start embedded --device cpu --dtype fp32 --episodes 2 --turns 2 --size 320x192 --num-tokens 64`.

contract: the contract suite. gap: log-probs against transformers. publish: pause and rate of weight updates. episodes:
concurrent episodes, one new screenshot a turn, each turn's prompt the whole episode so far, as a context policy that only
extends sends it; then the same requests statelessly: in any order, each behind a few ids of its own, so that no prompt
starts with what the server has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PARTS = ("contract", "gap", "publish", "episodes")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. What cannot work ends the program with a sentence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the served model")
    add("--url", help="a server that runs; else --start")
    add("--start", choices=("sglang", "embedded"), help="start one for the measurement")
    add("--python", default="", help="interpreter of the SGLang environment")
    add("--tp", type=int, default=1)
    add("--engine-args", default="", help="more arguments of the server, separated by blanks")
    add("--engine-gpus", default="", help="CUDA_VISIBLE_DEVICES of the started server, e.g. 1")
    add("--parts", default=",".join(PARTS), help="which, in this order")
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add("--device", default="cuda", help="of the started embedded server, and of transformers")
    add("--trainer-device", default="cuda:0", help="where published weights come from; cpu without a GPU")
    add(
        "--way",
        choices=("broadcast", "disk", "ipc"),
        help="default: broadcast with --engine-gpus or on a CPU; on one GPU ipc for sglang, else disk",
    )
    add("--bucket-mb", type=int, default=512)
    add("--num-tokens", type=int, default=2000, help="sampled tokens of the gap")
    add("--episodes", type=int, default=64, help="side by side")
    add("--turns", type=int, default=10, help="screenshots an episode")
    add("--size", default="1504x832", help="of a screenshot, px")
    add("--new-tokens", type=int, default=32, help="sampled a turn")
    add("--seconds", type=float, default=120, help="at most, for each of the two phases of episodes")
    add("--timeout-s", type=float, default=300, help="of one request, of the warm-up, of a publish")
    add("--out", type=Path, help="also write the JSON there")
    add("--log", type=Path, help="keep the log of the started server there")
    options = parser.parse_args(argv)
    options.parts = tuple(filter(None, options.parts.split(",")))
    options.url = (options.url or "").rstrip("/")
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"--parts: {unknown[0]!r} is none of {', '.join(PARTS)}")
    if bool(options.url) == bool(options.start):
        parser.error("give either --url or --start")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model: {options.model} holds no config.json")
    if not re.fullmatch(r"[1-9][0-9]*x[1-9][0-9]*", options.size):
        parser.error(f"--size: {options.size!r} is no WIDTHxHEIGHT, e.g. 1504x832")
    for name in ("tp", "bucket_mb", "num_tokens", "episodes", "turns", "new_tokens", "seconds", "timeout_s"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if options.device == "cpu":
        options.trainer_device = "cpu"
    if options.way is None:
        is_apart = bool(options.engine_gpus) or options.device == "cpu"
        options.way = "broadcast" if is_apart else "disk" if options.start == "embedded" else "ipc"
    return options


@contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """The URL of the server that is measured; one that was started here ends with the block."""
    if options.url:
        yield options.url
        return
    from rollout.engines.process import EngineProcess
    from slime_cua.config.rollout import EngineConfig

    config = EngineConfig(
        kind=options.start,
        python=options.python,
        tp=options.tp,
        dtype=options.dtype,
        max_batch=options.episodes,
        extra_args=tuple(options.engine_args.split()),
        start_timeout_s=900.0,
        request_timeout_s=options.timeout_s,
    )
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    with TemporaryDirectory(prefix="bench_rollout_") as folder:
        device = "cpu" if options.device == "cpu" else "cuda"
        log = options.log or Path(folder) / "engine.log"
        engine = EngineProcess(config, options.model, log, device=device)
        if options.engine_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = options.engine_gpus
        try:
            engine.start()
        finally:
            if options.engine_gpus:
                os.environ.pop("CUDA_VISIBLE_DEVICES")
                os.environ.update({"CUDA_VISIBLE_DEVICES": seen} if seen is not None else {})
        try:
            yield engine.url
        finally:
            engine.stop()


def measure_parts(url: str, options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Each part's figures into `found`, as soon as they are there."""
    import bench_rollout_load
    import bench_rollout_parts as parts

    with TemporaryDirectory(prefix="bench_rollout_weights_") as folder:
        for part in options.parts:
            print(f"measuring: {part}", file=sys.stderr, flush=True)
            if part == "contract":
                found[part] = parts.contract(url, 4 * options.timeout_s)
            elif part == "gap":
                found[part] = parts.gap(
                    url, options.model, options.num_tokens, options.device, options.dtype, options.timeout_s
                )
            elif part == "publish":
                found[part] = parts.publish(
                    url,
                    options.model,
                    way=options.way,
                    device=options.trainer_device,
                    engine_device=f"cuda:{options.engine_gpus.split(',')[0] or 0}",
                    bucket_mb=options.bucket_mb,
                    tp=options.tp,
                    timeout_s=options.timeout_s,
                    folder=Path(folder),
                )
            else:
                found[part] = asyncio.run(bench_rollout_load.measure(url, options.model, options))


def main() -> int:
    """0 when everything was measured and every goal is met, 1 when not, 2 for a wrong command line."""
    options = arguments()
    from bench_rollout_parts import goals  # seconds to import: a wrong command line is told before

    from slime_cua.core.errors import SlimeCuaError

    found: dict[str, Any] = {}
    problem = ""
    try:
        with server(options) as url:
            measure_parts(url, options, found)
    except (SlimeCuaError, TimeoutError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text)
    lines = goals(found)
    print("\n".join(lines))
    if problem:
        print(f"stopped: {problem}", file=sys.stderr)
    return int(bool(problem) or any(line.startswith("MISS") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
