"""The same numbers from transformers alone: log-probs, gradients, gradient norm. Float32, one sample at a time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from slime_cua.core.types import TrainSample
from slime_cua.data.expand import ImageProcessorConfig, expand_image_placeholders
from tests.numerics.tiny_models import IMAGE_TOKEN
from tests.numerics.trainer_cases import MemoryStore

NO_IMAGES = ImageProcessorConfig(
    image_token_id=-1, patch_size_px=16, merge_size=2, min_pixels=1, max_pixels=1
)


def reference(folder: Path, samples: list[TrainSample], store: MemoryStore) -> dict[str, Any]:
    """logp: trained tokens of each sample; grads: of the mean negative log-prob, by name; norm: of all of them."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    has_images = any(sample.segment.images for sample in samples)
    loader = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    model = loader.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder) if has_images else None
    config = ImageProcessorConfig.from_hf(folder) if has_images else NO_IMAGES
    num_tokens = sum(sum(s.segment.is_trained) for s in samples)
    logps = []
    for sample in samples:
        segment = sample.segment
        ids = torch.tensor([expand_image_placeholders(segment.token_ids, segment.images, config)])
        inputs: dict[str, Any] = {}
        if segment.images:
            images = [Image.open(io.BytesIO(store.get(ref))) for ref in segment.images]
            assert processor is not None
            inputs = dict(processor(images, return_tensors="pt"))
            inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0].float()
        logp = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        logp = logp[_trained_rows(sample, config)]
        logps.append(logp.detach().tolist())
        (-logp.sum() / num_tokens).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {
        "logp": logps,
        "grads": grads,
        "norm": float(torch.stack([g.norm() for g in grads.values()]).norm()),
    }


def _trained_rows(sample: TrainSample, config: ImageProcessorConfig) -> torch.Tensor:
    """Row t predicts token t + 1: the rows before trained tokens, counted with images expanded, in a plain loop."""
    rows, at, images = [], 0, iter(sample.segment.images)
    for token, is_trained in zip(sample.segment.token_ids, sample.segment.is_trained, strict=True):
        if is_trained:
            rows.append(at - 1)
        is_image = token == config.image_token_id
        at += len(expand_image_placeholders([token], [next(images)], config)) if is_image else 1
    return torch.tensor(rows)
