"""Command line: `python -m rollout.embedded --model DIR --port 0 --ready-file FILE`."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path

from rollout.embedded.checks import listen, read_model_config
from slime_cua.core.errors import SlimeCuaError
from slime_cua.core.startup import heavy_imports


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rollout.embedded", description="Serve a model over SGLang's HTTP contract."
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, written to --ready-file")
    parser.add_argument("--ready-file", type=Path, help="gets the URL when the server answers")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model")
    parser.add_argument("--max-batch", type=int, default=64, help="requests run together")
    parser.add_argument("--max-context-tokens", type=int, default=32768)
    parser.add_argument("--max-prefill-tokens", type=int, default=1024, help="prompt tokens a step")
    parser.add_argument(
        "--max-cached-tokens", type=int, default=65536, help="tokens of finished sequences kept"
    )
    parser.add_argument("--weight-version", default="0")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="deadline of a request or an update")
    parser.add_argument(
        "--lifeline", action="store_true", help="exit when standard input closes: dies with its parent"
    )
    return parser.parse_args()


def main() -> None:
    """Load, listen, tell the URL, serve until SIGTERM or SIGINT."""
    options = _options()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    if options.lifeline:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        read_model_config(options.model)
        listener = listen(options.host, options.port)
        with heavy_imports():
            from rollout.embedded.serve import serve

        serve(options, listener)
    except (SlimeCuaError, OSError) as error:
        sys.exit(f"embedded engine: {error}")


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
