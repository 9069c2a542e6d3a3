"""Floating-point operations that a micro-batch needs, by part of the model: the numerator of model FLOP utilisation. No torch.

Counted as two a multiply-add. Causal attention counts its half; gated delta net its recurrence (state read, update, read out),
not the chunked form that a kernel may use; the head its trained rows; the vision tower each image's own attention. What is
computed a second time for want of memory is not counted: that is what makes utilisation comparable. Packing balances the same count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_cua.data.packing import CostModel
from slime_cua.trainer.sizes import ModelShape


@dataclass(frozen=True)
class Flops:
    """Of one forward."""

    projections: float
    """Linear layers of attention, gated delta net, feed-forward, experts and routers."""
    attention: float
    """Scores and weighted values, causal."""
    recurrence: float
    """Gated delta net's state, and its convolution."""
    head: float
    vision: float

    def training(self, is_vision_frozen: bool) -> float:
        """Forward and backward: a backward is two forwards of what is trained."""
        text = self.projections + self.attention + self.recurrence + self.head
        return 3 * text + self.vision * (1 if is_vision_frozen else 3)


def forward_flops(
    shape: ModelShape, sequence_lengths: Sequence[int], num_rows: int, patches_of_images: Sequence[int]
) -> Flops:
    """Of a packed forward.

    sequence_lengths: tokens of each sequence, images expanded. num_rows: through the head. patches_of_images: of each image
    that the tower sees.
    """
    tokens = sum(sequence_lengths)
    num_full = shape.layers.count("full_attention")
    num_gdn = len(shape.layers) - num_full
    states = shape.gdn_value_heads * shape.gdn_key_dim * shape.gdn_value_dim
    return Flops(
        projections=2 * tokens * sum(weights_of_a_token(shape).values()),
        attention=2 * num_full * shape.queries * sum(length**2 for length in sequence_lengths),
        recurrence=num_gdn * tokens * (6 * states + 2 * shape.gdn_qkv * shape.gdn_kernel),
        head=2 * num_rows * shape.hidden * shape.vocab,
        vision=_vision(shape, patches_of_images),
    )


def weights_of_a_token(shape: ModelShape) -> Mapping[str, int]:
    """Weights of linear layers that one token meets in a forward, by part; the head and the embedding are left out."""
    hidden, num_layers = shape.hidden, len(shape.layers)
    num_full = shape.layers.count("full_attention")
    gdn = shape.gdn_qkv + 2 * shape.gdn_values + 2 * shape.gdn_value_heads
    return {
        "attention": num_full * hidden * (shape.query_rows + 2 * shape.keys + shape.queries),
        "gated delta net": (num_layers - num_full) * hidden * gdn,
        "feed-forward": num_layers * 3 * hidden * shape.ffn,
        "experts": num_layers * 3 * hidden * (shape.top_k * shape.expert_ffn + shape.shared_ffn),
        "router": num_layers * hidden * (shape.num_experts + bool(shape.shared_ffn)),
    }


def _vision(shape: ModelShape, patches_of_images: Sequence[int]) -> float:
    vision = shape.vision
    patches = sum(patches_of_images)
    block = 4 * vision.hidden**2 + 2 * vision.hidden * vision.ffn
    wide = vision.hidden * vision.merge**2
    merger = (1 + vision.num_deepstack) * wide * (wide + vision.out_hidden) / vision.merge**2
    linear = vision.depth * block + vision.hidden * vision.patch_features + merger
    scores = 4 * vision.depth * vision.hidden * sum(count**2 for count in patches_of_images)
    return 2 * patches * linear + scores


def cost_model(shape: ModelShape, is_vision_frozen: bool) -> CostModel:
    """What packing balances: training work in units of a token's linear layers, from the model's own sizes."""
    unit = 2 * sum(weights_of_a_token(shape).values())
    num_full = shape.layers.count("full_attention")
    one = forward_flops(shape, [1], 0, [])
    patches = shape.vision.merge**2
    vision = _vision(shape, [patches]) * (1 / 3 if is_vision_frozen else 1)
    return CostModel(
        per_token=(one.projections + one.recurrence) / unit,
        per_token_pair=2 * num_full * shape.queries / unit,
        per_image_token=vision / unit,
        per_trained_token=2 * shape.hidden * shape.vocab / unit,
    )
