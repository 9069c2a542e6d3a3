"""Tiny random checkpoints of the real architectures, for tests. 1-D tensors get noise: norm gains of 1 prove nothing."""

from __future__ import annotations

import json
from pathlib import Path

import torch

IMAGE_TOKEN, VISION_START, VISION_END = 6, 3, 4
FULL = ("full_attention",) * 3
HYBRID = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 1024, "longest_edge": 16777216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_rescale": True,
    "do_normalize": True,
    "do_resize": True,
    "do_convert_rgb": True,
}


def make_qwen35(
    folder: Path,
    layer_types: tuple[str, ...] = FULL,
    vocab_size: int = 384,
    is_tied: bool = True,
    linear_head_dim: int = 16,
) -> Path:
    """A Qwen3_5ForConditionalGeneration folder: hidden 64, 4 heads over 2, vision depth 2; bf16 weights."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    config = Qwen3_5Config(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": len(layer_types),
            "layer_types": list(layer_types),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": linear_head_dim,
            "linear_value_head_dim": linear_head_dim,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": is_tied,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=7,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=is_tied,
    )
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config)
    _write(model.to(torch.bfloat16), folder)
    return folder


def _write(model: torch.nn.Module, folder: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.dim() > 1:
                parameter.copy_(noise * 0.06)
            else:
                parameter.add_(noise * 0.2)
    model.save_pretrained(folder)  # type: ignore[operator]
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def make_qwen3vl(folder: Path) -> Path:
    """A Qwen3VLForConditionalGeneration folder with deepstack features after two vision blocks; bf16 weights, untied."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 384,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=7,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    _write(Qwen3VLForConditionalGeneration(config).to(torch.bfloat16), folder)
    return folder


def make_qwen3(folder: Path) -> Path:
    """A Qwen3ForCausalLM folder: text only, norms on query and key heads, tied head; bf16 weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    _write(Qwen3ForCausalLM(config).to(torch.bfloat16), folder)
    (folder / "preprocessor_config.json").unlink()
    return folder


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def make_qwen35_moe(folder: Path, layer_types: tuple[str, ...] = HYBRID) -> Path:
    """A Qwen3_5MoeForConditionalGeneration folder: gated delta net and attention, 4 experts, top 2, a shared expert."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    config = Qwen3_5MoeConfig(
        text_config={
            "vocab_size": 384,
            "hidden_size": 64,
            "num_hidden_layers": len(layer_types),
            "layer_types": list(layer_types),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            **MOE,
            "shared_expert_intermediate_size": 32,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=7,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    _write(Qwen3_5MoeForConditionalGeneration(config).to(torch.bfloat16), folder)
    return folder


def make_qwen3vl_moe(folder: Path) -> Path:
    """A Qwen3VLMoeForConditionalGeneration folder with deepstack features: 4 experts, top 2, in every layer."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    config = Qwen3VLMoeConfig(
        text_config={
            "vocab_size": 384,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            **MOE,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=7,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    _write(Qwen3VLMoeForConditionalGeneration(config).to(torch.bfloat16), folder)
    return folder


def store_experts(folder: Path, layout: str) -> Path:
    """Rewrite a folder's experts in another layout of slime_cua.convert.expert_layout. A plain loop of its own."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    num = MOE["num_experts"]
    stems = {name.split(".experts.")[0] + ".experts." for name in tensors if ".experts." in name}
    for stem in stems:
        if f"{stem}gate_up_proj" in tensors:
            fused, down = tensors.pop(f"{stem}gate_up_proj"), tensors.pop(f"{stem}down_proj")
            if fused.shape[1] != 2 * MOE["moe_intermediate_size"]:
                fused, down = fused.transpose(1, 2), down.transpose(1, 2)
        else:
            parts = {
                part: [tensors.pop(f"{stem}{e}.{part}.weight") for e in range(num)]
                for part in ("gate_proj", "up_proj", "down_proj")
            }
            pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
            fused, down = torch.stack([torch.cat(pair) for pair in pairs]), torch.stack(parts["down_proj"])
        if layout == "split":
            for e in range(num):
                gate, up = fused[e].split(MOE["moe_intermediate_size"])
                for part, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[e])):
                    tensors[f"{stem}{e}.{part}.weight"] = tensor.contiguous()
            continue
        if layout == "in_out":
            fused, down = fused.transpose(1, 2), down.transpose(1, 2)
        tensors[f"{stem}gate_up_proj"], tensors[f"{stem}down_proj"] = fused.contiguous(), down.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
