"""A model folder with random weights: real architecture, processor and tokenizer files, a few megabytes.

`python -m rollout.embedded.random_model DIR` writes one. It lets the engine, its contract suite and benchmarks run where
no checkpoint is at hand. The weights know nothing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
)
ROTATED_SHARE = 0.25
_CORPUS = (
    "press the blue button, then close the dialog",
    "write the number shown on the screen into the file",
    '{"name": "computer", "arguments": {"action": "left_click", "coordinate": [120, 840]}}',
)


@dataclass(frozen=True)
class RandomModelSpec:
    """Sizes of a random model. The defaults are those of the quickstart's base policy."""

    hidden: int = 192
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vision_hidden: int = 128
    vision_depth: int = 3
    vocab: int = 640
    vision_heads: int = 4
    layer_types: tuple[str, ...] = ()
    """Empty: full attention everywhere. Else one of full_attention, linear_attention a layer."""
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_head_dim: int = 32
    num_experts: int = 0
    """A mixture of so many experts, two a token and a shared one, in each layer; 0: dense."""
    init_std: float = 0.06
    """Larger than a trained model's start, so that logits are not flat."""
    seed: int = 0
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the folder's tensors."""


def write_random_model(folder: Path, spec: RandomModelSpec | None = None, device: str = "cpu") -> Path:
    """Write a Qwen3.5 vision-language model of `spec` into `folder`. Returns the folder.

    device: where the values are drawn; those of another device are others.
    """
    import torch
    from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration

    spec = spec or RandomModelSpec()
    model_class = Qwen3_5MoeForConditionalGeneration if spec.num_experts else Qwen3_5ForConditionalGeneration
    folder.mkdir(parents=True, exist_ok=True)
    ids, vocab = _write_tokenizer(folder, spec.vocab)
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)
        with torch.device(device):
            model = model_class(_config(spec, ids, vocab))
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv1d" not in name:
                torch.nn.init.normal_(parameter, std=spec.init_std)
            elif "norm" in name and name.endswith("weight"):
                torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
    torch.nn.Module.to(
        model, torch.bfloat16 if spec.dtype == "bf16" else torch.float32
    )  # transformers' own is untyped
    model.save_pretrained(folder)
    _name_what_others_read(folder)
    write_processor(folder)
    return folder


def _name_what_others_read(folder: Path) -> None:
    """SGLang derives the layers' kinds from an interval and asks for both fields; transformers writes neither."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kinds = config["text_config"]["layer_types"]
    interval = 1 + next((i for i, kind in enumerate(kinds) if kind == "full_attention"), len(kinds))
    config["text_config"]["full_attention_interval"] = interval
    config["vision_config"]["deepstack_visual_indexes"] = []
    path.write_text(json.dumps(config, indent=2))


def _mrope_section(head_dim: int) -> list[int]:
    """Rotated pairs for time, height and width, as even as they go; Qwen3.5's [11, 11, 10] at 256."""
    pairs = int(head_dim * ROTATED_SHARE) // 2
    time = -(-pairs // 3)
    height = -(-(pairs - time) // 2)
    return [time, height, pairs - time - height]


def _config(spec: RandomModelSpec, ids: dict[str, int], vocab: int) -> Any:
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig

    experts = {
        "num_experts": spec.num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": spec.hidden,
        "shared_expert_intermediate_size": spec.hidden,
    }
    text = {
        **(experts if spec.num_experts else {}),
        "vocab_size": vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": 3 * spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "layer_types": list(spec.layer_types) or ["full_attention"] * spec.layers,
        "linear_num_key_heads": spec.linear_key_heads,
        "linear_num_value_heads": spec.linear_value_heads,
        "linear_key_head_dim": spec.linear_head_dim,
        "linear_value_head_dim": spec.linear_head_dim,
        "max_position_embeddings": 32768,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": _mrope_section(spec.head_dim),
            "mrope_interleaved": True,
            "partial_rotary_factor": ROTATED_SHARE,
        },
    }
    vision = {
        "depth": spec.vision_depth,
        "hidden_size": spec.vision_hidden,
        "intermediate_size": 2 * spec.vision_hidden,
        "num_heads": spec.vision_heads,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": spec.hidden,
        "num_position_embeddings": 2304,
    }
    return (Qwen3_5MoeConfig if spec.num_experts else Qwen3_5Config)(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def _write_tokenizer(folder: Path, vocab: int) -> tuple[dict[str, int], int]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder)
    padded = -(-len(tokenizer) // 64) * 64
    return {token: index for index, token in enumerate(SPECIAL_TOKENS)}, padded


def write_processor(folder: Path) -> None:
    """The image processor of the Qwen3.5 and Qwen3-VL families, as preprocessor_config.json."""
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 1024, "longest_edge": 16777216},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=192, help="a multiple of --heads")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vision-hidden", type=int, default=128)
    parser.add_argument(
        "--linear-head-dim",
        type=int,
        default=0,
        help="above 0: three of four layers are gated delta net, with heads of that width",
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", default="cpu", help="where the values are drawn")
    options = parser.parse_args()
    kinds = tuple("full_attention" if i % 4 == 3 else "linear_attention" for i in range(options.layers))
    spec = RandomModelSpec(
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        vision_hidden=options.vision_hidden,
        layer_types=kinds if options.linear_head_dim else (),
        linear_key_heads=options.heads,
        linear_value_heads=2 * options.heads,
        linear_head_dim=options.linear_head_dim or 32,
        init_std=0.06 if options.hidden < 512 else 0.02,
        seed=options.seed,
        dtype=options.dtype,
    )
    print(write_random_model(options.folder, spec, options.device))


if __name__ == "__main__":
    main()
