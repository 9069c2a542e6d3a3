"""Sizes of a model from its config.json: parameters by how they are split over ranks. No torch.

Legend: H hidden, F feed-forward width, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime_cua.core.errors import ConfigError
from slime_cua.trainer.layouts import num_experts, parts_of

Split = Literal["tp", "expert", "whole"]
"""tp: over tensor-parallel ranks. expert: over expert-parallel ranks (over tp where ep is 1). whole: a copy on each rank."""


@dataclass(frozen=True)
class VisionShape:
    """Of the vision tower; Qwen3-VL's, with or without deepstack."""

    depth: int
    hidden: int
    ffn: int
    out_hidden: int
    patch_features: int
    """Numbers of one patch."""
    merge: int
    """Patches an image token: its square."""
    num_positions: int
    num_deepstack: int


NO_VISION = VisionShape(
    depth=0, hidden=0, ffn=0, out_hidden=0, patch_features=0, merge=1, num_positions=0, num_deepstack=0
)
"""Of a text model: nothing counts."""


@dataclass(frozen=True)
class ModelShape:
    """What memory and work depend on."""

    hidden: int
    vocab: int
    is_tied: bool
    layers: tuple[Literal["full_attention", "linear_attention"], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_output_gate: bool
    """Queries come with a gate of their size (Qwen3.5)."""
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    gdn_kernel: int
    ffn: int
    """Of a dense layer; 0 with experts."""
    num_experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int
    """0: no shared expert."""
    vision: VisionShape

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Of a config.json. Raises ConfigError for a family without a trainer, and naming a field that is not there."""
        try:
            return cls._read(config)
        except KeyError as error:
            raise ConfigError(
                f"the model's config.json lacks {error.args[0]}: compare it with the published one"
            ) from None

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> ModelShape:
        parts = parts_of(config)
        text, experts = config.get("text_config") or config, num_experts(config)
        is_35 = str(config["model_type"]).startswith("qwen3_5")
        num_layers = int(text["num_hidden_layers"])
        kinds: list[Any] = text.get("layer_types") or _every(
            int(text.get("full_attention_interval", 4)), num_layers
        )
        heads = int(text["num_attention_heads"])
        return cls(
            hidden=int(text["hidden_size"]),
            vocab=int(text["vocab_size"]),
            is_tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            layers=tuple(kinds if is_35 else ["full_attention"] * num_layers),
            num_heads=heads,
            num_kv_heads=int(text["num_key_value_heads"]),
            head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
            has_output_gate=is_35,
            gdn_key_heads=int(text.get("linear_num_key_heads", 0)),
            gdn_value_heads=int(text.get("linear_num_value_heads", 0)),
            gdn_key_dim=int(text.get("linear_key_head_dim", 0)),
            gdn_value_dim=int(text.get("linear_value_head_dim", 0)),
            gdn_kernel=int(text.get("linear_conv_kernel_dim", 4)),
            ffn=0 if "experts" in parts else int(text["intermediate_size"]),
            num_experts=experts,
            top_k=int(text.get("num_experts_per_tok", 0)),
            expert_ffn=int(text.get("moe_intermediate_size", 0)) if experts else 0,
            shared_ffn=int(text.get("shared_expert_intermediate_size") or 0) if experts and is_35 else 0,
            vision=_vision(config["vision_config"]) if "vision_config" in config else NO_VISION,
        )

    @property
    def gdn_qkv(self) -> int:
        """Channels of the convolution of gated delta net."""
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_values

    @property
    def gdn_values(self) -> int:
        """Width of gated delta net's values, gate and output."""
        return self.gdn_value_heads * self.gdn_value_dim

    @property
    def queries(self) -> int:
        """Width of the attention output before projection."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of keys, and of values."""
        return self.num_kv_heads * self.head_dim

    @property
    def query_rows(self) -> int:
        """Rows of the query projection: with an output gate twice the width."""
        return self.queries * (2 if self.has_output_gate else 1)


@dataclass(frozen=True)
class Parameters:
    """Parameters of one kind in the whole model."""

    name: str
    count: int
    split: Split
    is_vision: bool = False


def parameters(shape: ModelShape) -> tuple[Parameters, ...]:
    """All parameters of the model, MTP heads left out (they are carried along, not loaded)."""
    hidden = shape.hidden
    num_full = sum(kind == "full_attention" for kind in shape.layers)
    num_gdn, num_layers = len(shape.layers) - num_full, len(shape.layers)
    attention = hidden * (shape.query_rows + 2 * shape.keys) + shape.queries * hidden
    gdn = hidden * (shape.gdn_qkv + shape.gdn_values + 2 * shape.gdn_value_heads) + shape.gdn_values * hidden
    gdn += shape.gdn_qkv * shape.gdn_kernel + 2 * shape.gdn_value_heads
    found = [
        Parameters("embedding", shape.vocab * hidden, "tp"),
        Parameters("head", 0 if shape.is_tied else shape.vocab * hidden, "tp"),
        Parameters("attention", num_full * attention, "tp"),
        Parameters("gated delta net", num_gdn * gdn, "tp"),
        Parameters("feed-forward", num_layers * 3 * hidden * shape.ffn, "tp"),
        Parameters("shared expert", num_layers * 3 * hidden * shape.shared_ffn, "tp"),
        Parameters("experts", num_layers * shape.num_experts * 3 * hidden * shape.expert_ffn, "expert"),
        Parameters("router", num_layers * hidden * (shape.num_experts + bool(shape.shared_ffn)), "whole"),
        Parameters(
            "norms",
            (2 * num_layers + 1) * hidden + num_full * 2 * shape.head_dim + num_gdn * shape.gdn_value_dim,
            "whole",
        ),
        Parameters("vision", vision_parameters(shape.vision), "whole", is_vision=True),
    ]
    return tuple(kind for kind in found if kind.count)


def vision_parameters(vision: VisionShape) -> int:
    """Blocks (two norms, qkv, projection, two-layer MLP, biases), patch and position embeddings, mergers."""
    hidden = vision.hidden
    block = 4 * hidden + 3 * hidden * (hidden + 1) + hidden * (hidden + 1)
    block += vision.ffn * (hidden + 1) + hidden * (vision.ffn + 1)
    wide = hidden * vision.merge**2
    projection = wide * (wide + 1) + vision.out_hidden * (wide + 1)
    return (
        vision.depth * block
        + hidden * (vision.patch_features + 1)
        + vision.num_positions * hidden
        + 2 * hidden
        + projection
        + vision.num_deepstack * (2 * wide + projection)
    )


def _vision(plain: Mapping[str, Any]) -> VisionShape:
    patch = int(plain.get("patch_size", 16))
    features = int(plain.get("in_channels", 3)) * int(plain.get("temporal_patch_size", 2)) * patch**2
    return VisionShape(
        depth=int(plain["depth"]),
        hidden=int(plain["hidden_size"]),
        ffn=int(plain["intermediate_size"]),
        out_hidden=int(plain["out_hidden_size"]),
        patch_features=features,
        merge=int(plain.get("spatial_merge_size", 2)),
        num_positions=int(plain["num_position_embeddings"]),
        num_deepstack=len(plain.get("deepstack_visual_indexes") or ()),
    )


def _every(interval: int, num_layers: int) -> list[str]:
    return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]


_QWEN35_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
}
PRESETS: dict[str, dict[str, Any]] = {
    "Qwen3.5-27B": {
        "model_type": "qwen3_5",
        "text_config": {
            "vocab_size": 248320,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "full_attention_interval": 4,
            "tie_word_embeddings": False,
        },
        "vision_config": {**_QWEN35_VISION, "out_hidden_size": 5120},
    },
    "Qwen3.5-35B-A3B": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "full_attention_interval": 4,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
        },
        "vision_config": {**_QWEN35_VISION, "out_hidden_size": 2048},
    },
}
"""Only the numbers that memory depends on. Source: the two models' published config.json (hidden 5120, 64 layers, 24/4 heads of
256, 16/48 linear heads of 128, width 17408) and, for 35B-A3B, the defaults of transformers' Qwen3_5MoeTextConfig."""
