"""Write config.json and the processor files of models/tiny_base: python scripts/make_tiny_config.py [FOLDER].

Token ids are read from the folder's tokenizer.json. The architecture is Qwen3.5 with attention in every layer; heads divide
by two, so tensor parallelism of two needs no replication. A 640x384 screenshot keeps its size; a token covers 64 x 64
pixels, so it is 10 x 6 = 60 tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer

NUM_LAYERS = 4
HIDDEN = 192
MERGE = 4
"""Patches along each axis that become one image token: four times fewer tokens than the usual 2."""
PATCH = {"patch_size": 16, "temporal_patch_size": 2}
IMAGE = {
    **PATCH,
    "merge_size": MERGE,
    "size": {"shortest_edge": 4096, "longest_edge": 1048576},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,
    "processor_class": "Qwen3VLProcessor",
}


def model_config(tokenizer: Tokenizer) -> dict[str, object]:
    """config.json of the tiny policy.

    `full_attention_interval`, `attn_output_gate`, `rope_theta`, `partial_rotary_factor` and `deepstack_visual_indexes`
    repeat what transformers derives: other loaders of the architecture read them.
    """
    ids = tokenizer.token_to_id
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "full_attention_interval": 1,
        "attn_output_gate": True,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "max_position_embeddings": 16384,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            **rope,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        **rope,
        "eos_token_id": ids("<|im_end|>"),
        "pad_token_id": ids("<|endoftext|>"),
        "dtype": "float32",
    }
    vision = {
        "model_type": "qwen3_5_vision",
        "depth": 3,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_heads": 4,
        **PATCH,
        "spatial_merge_size": MERGE,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [],
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "float32",
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }


def main(folder: Path) -> None:
    """Write the four JSON files beside tokenizer.json."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    files = {
        "config.json": model_config(tokenizer),
        "generation_config.json": {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": True},
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **IMAGE},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor", **IMAGE},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the config files of the tiny policy.")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(__file__).parents[1] / "models" / "tiny_base"
    )
    main(parser.parse_args().folder)
