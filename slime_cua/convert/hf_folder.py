"""Hugging Face folders, strictly: what is in them, whether it is whole, and writing new ones that a reader never sees half.

Reads safetensors headers only: no tensor is loaded, no torch is needed.
"""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_cua.core.errors import CheckpointError

WEIGHT_NAMES = ("model.safetensors", "model.safetensors.index.json")
_HEADER_LIMIT_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its header declares it."""

    file: str
    dtype: str
    """safetensors spelling: F32, BF16, F16, ..."""
    shape: tuple[int, ...]


def read_config(hf_dir: Path | str) -> dict[str, Any]:
    """config.json of the folder. Raises CheckpointError when the folder or the file is missing or broken."""
    path = Path(hf_dir) / "config.json"
    if not Path(hf_dir).is_dir():
        raise CheckpointError(f"model folder {hf_dir} does not exist; give a Hugging Face checkpoint folder")
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{hf_dir} has no config.json: it is no Hugging Face checkpoint folder"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return config


def tensor_table(hf_dir: Path | str) -> dict[str, TensorInfo]:
    """Every tensor of the folder's safetensors files.

    Raises CheckpointError, naming file and tensor: no weights, a shard that the index names is missing or truncated, a tensor
    that the index names is not in its shard, or one that is there but not in the index.
    """
    folder = Path(hf_dir)
    index_path = folder / "model.safetensors.index.json"
    if not index_path.is_file():
        if not (folder / "model.safetensors").is_file():
            raise CheckpointError(f"{folder} has no model.safetensors and no model.safetensors.index.json")
        return _read_header(folder / "model.safetensors")
    try:
        weight_map: dict[str, str] = dict(json.loads(index_path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index_path} is broken: {error!r}") from None
    table: dict[str, TensorInfo] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            lost = sum(name == file for name in weight_map.values())
            raise CheckpointError(
                f"shard {file} of {folder} is missing; {lost} tensors were in it: copy it again"
            )
        table.update(_read_header(folder / file))
    for name, file in weight_map.items():
        if name not in table or table[name].file != file:
            raise CheckpointError(f"tensor {name} is not in {file}, where the index of {folder} says it is")
    extra = sorted(set(table) - set(weight_map))
    if extra:
        raise CheckpointError(f"tensor {extra[0]} of {folder}/{table[extra[0]].file} is not in the index")
    return table


def _read_header(path: Path) -> dict[str, TensorInfo]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_HEADER_LIMIT_BYTES, size - 8):
            raise CheckpointError(f"{path} is truncated or no safetensors file ({size} bytes): copy it again")
        text = file.read(length)
    try:
        header = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        table = {n: TensorInfo(path.name, e["dtype"], tuple(e["shape"])) for n, e in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise CheckpointError(f"{path} has a broken safetensors header: copy it again") from None
    if 8 + length + end != size:
        raise CheckpointError(
            f"{path} is truncated: {size} bytes, its header needs {8 + length + end}: copy it again"
        )
    return table


def compare_tables(
    found: dict[str, TensorInfo],
    expected: dict[str, tuple[int, ...]],
    folder: Path | str,
    passed: tuple[str, ...] = (),
) -> None:
    """Raise CheckpointError for the first missing, extra or misshapen tensors.

    expected: name -> shape. passed: prefixes of tensors that may be there without being expected (kept as they are).
    """
    missing = sorted(set(expected) - set(found))
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(expected)} tensors that its config.json asks for, first {missing[0]}"
        )
    extra = sorted(name for name in set(found) - set(expected) if not name.startswith(passed or ("\0",)))
    if extra:
        raise CheckpointError(
            f"{folder} has {len(extra)} tensors that its config.json does not ask for, first {extra[0]}"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise CheckpointError(
                f"tensor {name} of {folder} has shape {list(found[name].shape)}; its config.json asks for {list(shape)}"
            )


def copy_companions(source: Path | str, target: Path) -> None:
    """Copy everything that is not weights: config, tokenizer, chat template, processor files. The model card speaks of other
    weights and stays behind."""
    for path in sorted(Path(source).iterdir()):
        if path.name == "README.md":
            continue
        is_weight = path.suffix in (".safetensors", ".bin", ".pt", ".pth") or path.name in WEIGHT_NAMES
        if path.is_file() and not is_weight and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)
