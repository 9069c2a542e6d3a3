"""What is checked before anything heavy is imported: a wrong start fails in a fraction of a second."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from slime_cua.core.errors import ConfigError, PreflightError

SUPPORTED_TYPES = ("qwen3_5", "qwen3_5_moe")


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json of a model that the embedded engine serves. Raises ConfigError that says what it serves."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: --model must be a Hugging Face checkpoint folder")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if config.get("model_type") not in SUPPORTED_TYPES:
        raise ConfigError(
            f"{path}: model_type {config.get('model_type')!r} is not served by the embedded engine "
            f"(it serves {', '.join(SUPPORTED_TYPES)}); use engine.kind=sglang"
        )
    return config


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises PreflightError when the port is in use."""
    # The protocol is named: asyncio sends small packets at once (TCP_NODELAY) only on sockets that say they are TCP.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PreflightError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or 0"
        ) from error
    return listener
