"""A model of real widths with random weights, without the hours that writing and reading them would take.

The folder holds configs and safetensors whose bytes are holes: right names, shapes and sizes for whoever checks them. Values are
made when the model asks for them, on the device, from the tensor's name alone: every layout gets the same model.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLASSES = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
"""model_type -> stem of transformers' classes."""
SHARD_BYTES = 4 << 30
TINY_TEXT = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TINY_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
TINY_VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64}


def with_layers(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The config.json of the same model with its first `num_layers` layers."""
    text = {**config["text_config"], "num_hidden_layers": num_layers}
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][:num_layers]
    return {**config, "text_config": text}


def write_hollow_folder(folder: Path, config: dict[str, Any]) -> None:
    """A Hugging Face folder of the config's architecture, all tensors bf16; it takes no room on disk."""
    import transformers

    from rollout.embedded.random_model import write_processor
    from slime_cua.convert import expected_shapes

    folder.mkdir(parents=True, exist_ok=True)
    stem = CLASSES[config["model_type"]]
    head_dim = config["text_config"]["head_dim"]
    text = {
        **config["text_config"],
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "mrope_section": [2, 1, 1] if head_dim < 64 else [11, 11, 10],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
    }
    ids = {"image_token_id": 6, "video_token_id": 7, "vision_start_token_id": 3, "vision_end_token_id": 4}
    built = getattr(transformers, f"{stem}Config")(
        text_config=text, vision_config=config["vision_config"], **ids
    )
    built.architectures = [f"{stem}ForConditionalGeneration"]
    built.save_pretrained(folder)
    write_processor(folder)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in expected_shapes(folder).items():
        if size + _num_bytes(shape) > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += _num_bytes(shape)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shapes in zip(files, shards, strict=True):
        _write_holes(folder / file, shapes)
    weight_map = {name: file for file, shapes in zip(files, shards, strict=True) for name in shapes}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _num_bytes(shape: tuple[int, ...]) -> int:
    number = 2
    for side in shape:
        number *= side
    return number


def _write_holes(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of bf16 tensors that was cut to its length and never filled."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + _num_bytes(shape)]}
        end += _num_bytes(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def random_weights(device: Any) -> Callable[..., None]:
    """In place of PolicyModel.load_weights: values made on `device`, from each tensor's name, deviation 0.02."""

    def load_weights(model: Any, hf_dir: Path | str, tensors: dict[str, Any]) -> None:
        from mcore_bridge.utils.safetensors import LazyTensor

        def made(name: str, ignored: Any) -> tuple[str, Any]:
            return name, LazyTensor(loader=lambda: random_tensor(name, tensors[name].shape, device))

        model.config.bridge.load_weights([model.module], str(hf_dir), converter=made)

    return load_weights


def random_tensor(name: str, shape: tuple[int, ...], device: Any) -> Any:
    """Normal matrices; norm gains near their neutral value, decays as a fresh gated delta net has them, zero biases."""
    import torch

    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    if len(shape) > 1:
        return torch.empty(shape, **options).normal_(0.0, 0.02, generator=generator)
    if name.endswith("A_log"):
        return torch.rand(shape, device=device, generator=generator).mul(15).add(1).log().to(torch.bfloat16)
    is_visual_gain = "visual" in name and "norm" in name and name.endswith("weight")
    is_one = name.endswith(("dt_bias", "linear_attn.norm.weight")) or is_visual_gain
    return torch.full(shape, 1.0 if is_one else 0.0, **options)
