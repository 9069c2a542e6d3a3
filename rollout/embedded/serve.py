"""From command-line options to a listening server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from pathlib import Path

import torch
import transformers
import uvicorn

from rollout.embedded.engine import Engine
from rollout.embedded.model import EngineModel
from rollout.embedded.server import Service, make_app
from slime_cua.core.files import write_atomic

_KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that none is closed under a request."""


def serve(options: argparse.Namespace, listener: socket.socket) -> None:
    """Serve on `listener` until a signal. The ready file appears when it answers.

    Raises ConfigError or CheckpointError for a bad model folder.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    model = EngineModel(options.model, options.dtype, options.device)
    engine = Engine(
        model,
        max_batch=options.max_batch,
        max_prefill_tokens=options.max_prefill_tokens,
        max_cached_tokens=options.max_cached_tokens,
        weight_version=options.weight_version,
    )
    engine.start()
    service = Service(engine, max_context_tokens=options.max_context_tokens, timeout_s=options.timeout_s)
    config = uvicorn.Config(
        make_app(service),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
    )
    url = f"http://{options.host}:{listener.getsockname()[1]}"
    server = _AnnouncingServer(config, url, options.ready_file)
    try:
        asyncio.run(server.serve(sockets=[listener]))
    finally:
        engine.stop()


class _AnnouncingServer(uvicorn.Server):
    """Tells its URL when it accepts connections."""

    def __init__(self, config: uvicorn.Config, url: str, ready_file: Path | None) -> None:
        super().__init__(config)
        self._url = url
        self._ready_file = ready_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            print(self._url, flush=True)
            if self._ready_file:
                write_atomic(self._ready_file, self._url.encode())
