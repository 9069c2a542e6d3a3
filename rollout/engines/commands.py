"""Command lines of the policy servers."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from slime_cua.config.rollout import EngineConfig

logger = logging.getLogger(__name__)

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

STATES_A_REQUEST = 5
"""SGLang 0.5.17 keeps so many for a running request, and takes fewer requests where they do not fit."""


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
        f"--context-length={_context_tokens(model, config.max_context_tokens)}",
        f"--max-running-requests={config.max_batch}",
        f"--weight-version={version}",
        *SGLANG_FLAGS,
        *_state_pool_flags(model, config.max_batch),
        *config.extra_args,
    ]


def _text_config(model: Path) -> dict[str, Any]:
    path = model / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    text: dict[str, Any] = config.get("text_config", config)
    return text


def _context_tokens(model: Path, wanted: int) -> int:
    """SGLang stops at start when asked for more than the model has; the embedded engine takes what there is."""
    most = int(_text_config(model).get("max_position_embeddings") or wanted)
    if most < wanted:
        logger.warning(
            "max_context_tokens = %d: %s has %d positions, that many are served", wanted, model, most
        )
    return min(wanted, most)


def _state_pool_flags(model: Path, max_batch: int) -> list[str]:
    """SGLang sizes the pool of recurrent states by a state's bytes, and stops at start where Qwen3.5 has no such layer
    (models/tiny_base): there the number is given instead."""
    text = _text_config(model)
    kinds = text.get("layer_types") or ["linear_attention"]
    if not str(text.get("model_type", "")).startswith("qwen3_5") or "linear_attention" in kinds:
        return []
    return [f"--max-mamba-cache-size={STATES_A_REQUEST * max_batch}"]
