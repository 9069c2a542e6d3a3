"""Names and shapes that a Hugging Face config asks for, from transformers' own model class on the meta device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_cua.convert.expert_layout import expected_in_layout, expert_layout
from slime_cua.convert.hf_folder import TensorInfo, compare_tables, read_config, tensor_table
from slime_cua.core.errors import CheckpointError

PASSED_PREFIXES = ("mtp.",)
"""Multi-token prediction heads: not part of the model class, carried along unchanged."""


DTYPES = ("BF16", "F16", "F32")
"""In safetensors' spelling: those of weights that can be trained and given back as they were; float64 would be rounded."""


def check_hf_folder(hf_dir: Path | str) -> dict[str, TensorInfo]:
    """The folder's tensors, after a strict check against its config: every name, every shape, no more, no less.

    No weight is loaded. Raises CheckpointError with the first offending name.
    """
    check_tokenizer(hf_dir)
    found = tensor_table(hf_dir)
    check_dtypes(found, hf_dir)
    expected = expected_in_layout(expected_shapes(hf_dir), expert_layout(found, read_config(hf_dir)))
    compare_tables(found, expected, hf_dir, PASSED_PREFIXES)
    return found


def check_dtypes(table: Mapping[str, TensorInfo], hf_dir: Path | str) -> None:
    """Raise CheckpointError for the first tensor of another dtype: quantised values mean nothing without their scales."""
    for name, info in sorted(table.items()):
        if info.dtype not in DTYPES and not name.startswith(PASSED_PREFIXES):
            raise CheckpointError(
                f"tensor {name} of {hf_dir} is stored as {info.dtype}; {', '.join(DTYPES)} are read: give the checkpoint that is not quantised and in one of them"
            )


def check_tokenizer(hf_dir: Path | str) -> None:
    """Raise CheckpointError when tokenizer.json has an id, or config.json an image token, beyond the vocabulary."""
    config = read_config(hf_dir)
    vocab_size = (config.get("text_config") or config).get("vocab_size")
    path = Path(hf_dir) / "tokenizer.json"
    if not isinstance(vocab_size, int):
        return
    ids: list[Any] = [config.get("image_token_id", 0)]
    if path.is_file():
        try:
            plain = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from None
        vocab = plain.get("model", {}).get("vocab", {})
        ids += vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]
        ids += [token["id"] for token in plain.get("added_tokens", [])]
    highest = max(value for value in ids if isinstance(value, int))
    if highest >= vocab_size:
        raise CheckpointError(
            f"{hf_dir}: token id {highest} is beyond the model's vocab_size {vocab_size}: tokenizer and model do not belong together"
        )


def expected_shapes(hf_dir: Path | str) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape as transformers' class has them, experts in layout out_in. Tied heads appear once, under the embedding's name."""
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(str(hf_dir))
    except Exception as error:  # an unknown kind of config, or values that its class does not take
        raise CheckpointError(f"{hf_dir}: transformers cannot read config.json: {error}") from error
    names = getattr(config, "architectures", None) or []
    model_class: Any = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        raise CheckpointError(f"{hf_dir}: config.json names no architecture that transformers has: {names}")
    try:
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:  # whatever a class of transformers says to numbers that do not belong together
        raise CheckpointError(
            f"{hf_dir}: {names[0]} cannot be built from config.json, compare it with the published one: {type(error).__name__}: {error}"
        ) from error
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}
