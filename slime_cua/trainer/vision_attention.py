"""Attention of the vision tower over many images in one call.

transformers runs one attention call an image; 256 images of one size then cost 256 launches a layer.
Legend: P patches, N heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

ATTENTION_NAME = "slime_cua_flash"
"""transformers hands over sequence boundaries, instead of splitting itself, to implementations with flash in the name."""


def images_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Full attention inside each image. query, key, value: [1, N, P, D]; gives [1, P, N, D].

    Images of one size are a batch; otherwise one call an image.
    """
    assert cu_seq_lens_q is not None and max_length_q is not None
    num_images, num_patches = cu_seq_lens_q.numel() - 1, query.shape[2]
    if num_images * max_length_q == num_patches:
        q, k, v = (x[0].unflatten(1, (num_images, -1)).transpose(0, 1) for x in (query, key, value))
        y = F.scaled_dot_product_attention(q, k, v, scale=scaling)
        return y.transpose(1, 2).flatten(0, 1)[None], None
    lengths = (cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]).tolist()
    split = (torch.split(x, lengths, dim=2) for x in (query, key, value))
    parts = [F.scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in zip(*split, strict=True)]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def register_vision_attention() -> None:
    """Make ATTENTION_NAME known to transformers. Once is enough; again does no harm."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, images_attention)
