"""Command lines of the policy servers."""

from __future__ import annotations

import sys
from pathlib import Path

from slime_cua.config.rollout import EngineConfig

SGLANG_ENVIRONMENT = {"SGLANG_MM_AVOID_RETOKENIZE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
"""Without the first SGLang decodes a vision request's ids and tokenises the text again; without the second /health takes a
second, generates a token, and fails while the engine is paused or compiles a kernel."""
SGLANG_SITE = Path(__file__).parent / "sglang_site"
"""On the server's path: names `slime_cua_sglang` beside it as a plugin of SGLang."""
SGLANG_FLAGS = (
    "--attention-backend=triton",
    "--mm-attention-backend=triton_attn",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--skip-server-warmup",
)
"""Seen working with the pinned set; `engine.extra_args` come later and win."""


def embedded_command(
    config: EngineConfig, model: Path, ready_file: Path, port: int, version: int, device: str = "cpu"
) -> list[str]:
    """`python -m rollout.embedded`; the URL appears in `ready_file` when it answers."""
    return [
        config.python or sys.executable,
        "-m",
        "rollout.embedded",
        f"--model={model}",
        f"--port={port}",
        f"--ready-file={ready_file}",
        f"--dtype={config.dtype}",
        f"--device={device}",
        f"--threads={config.num_threads}",
        f"--max-batch={config.max_batch}",
        f"--max-context-tokens={config.max_context_tokens}",
        f"--weight-version={version}",
        f"--timeout-s={config.request_timeout_s}",
        "--lifeline",
        *config.extra_args,
    ]


def sglang_command(config: EngineConfig, model: Path, host: str, port: int, version: int) -> list[str]:
    """`python -m sglang.launch_server` of the interpreter `engine.python`."""
    return [
        config.python or sys.executable,
        "-m",
        "sglang.launch_server",
        f"--model-path={model}",
        f"--host={host}",
        f"--port={port}",
        f"--tp-size={config.tp}",
        f"--dtype={'bfloat16' if config.dtype == 'bf16' else 'float32'}",
        f"--context-length={config.max_context_tokens}",
        f"--max-running-requests={config.max_batch}",
        f"--weight-version={version}",
        *SGLANG_FLAGS,
        *config.extra_args,
    ]
