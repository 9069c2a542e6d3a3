"""`slime-cua convert`: Hugging Face folders to Megatron checkpoints and back, a layer at a time."""

from __future__ import annotations

import argparse
from pathlib import Path

from slime_cua.core.errors import CheckpointError

EXAMPLES = """
  slime-cua convert to-megatron --hf models/tiny_base --out runs/start
  slime-cua convert to-hf --checkpoint runs/mine/checkpoints --hf models/tiny_base --out models/trained
"""


def main(arguments: list[str]) -> int:
    """Run the command line; its exit code. Raises CheckpointError or ConfigError with the reason."""
    options = _parser().parse_args(arguments)
    _check_target(Path(options.out), is_replaced=options.way == "to-hf")
    if options.way == "to-hf":
        from slime_cua.trainer.stream_export import stream_to_hf

        saved, source, target = Path(options.checkpoint), Path(options.hf), Path(options.out)
        print(f"step {stream_to_hf(saved, source, target, options.dtype, shows_progress=True)} -> {target}")
        return 0
    from slime_cua.trainer.stream_import import stream_to_megatron

    print(stream_to_megatron(Path(options.hf), Path(options.out), options.dtype, shows_progress=True))
    return 0


def _check_target(target: Path, is_replaced: bool) -> None:
    """CheckpointError when `target` is a file, or would be replaced and is no Hugging Face checkpoint: what is in it would be lost."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"--out {target} is a file: give a folder")
    is_checkpoint = (target / "config.json").is_file() and any(target.glob("*.safetensors"))
    if is_replaced and target.is_dir() and any(target.iterdir()) and not is_checkpoint:
        raise CheckpointError(
            f"--out {target} holds files and is no Hugging Face checkpoint, which alone is replaced: give a new or an empty folder"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime-cua convert",
        description=__doc__,
        epilog=f"examples:{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ways = parser.add_subparsers(dest="way", required=True)
    start = ways.add_parser(
        "to-megatron", help="weights as a checkpoint that a trainer of any layout can start from"
    )
    start.add_argument("--hf", required=True, help="Hugging Face checkpoint folder")
    start.add_argument("--out", required=True, help="folder that gets step_00000000")
    start.add_argument(
        "--dtype",
        choices=("source", "fp32", "bf16"),
        default="source",
        help="dtype of the weights; source: bf16, or fp32 where that would round one",
    )
    end = ways.add_parser("to-hf", help="a Hugging Face folder from a run's checkpoint")
    end.add_argument("--checkpoint", required=True, help="a step_XXXXXXXX folder, or its parent: the newest")
    end.add_argument(
        "--hf",
        required=True,
        help="folder that the run started from: config, tokenizer and processor files are copied, tensor names, dtypes and shards kept",
    )
    end.add_argument(
        "--out", required=True, help="Hugging Face folder to write; one that is there is replaced"
    )
    end.add_argument("--dtype", choices=("source", "fp32", "bf16"), default="source", help="dtype written")
    return parser
