"""The tiny policy's folder loads in transformers, and its processor sees what the renderer counts."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from rollout.actions import ActionSpace
from rollout.context import SlidingWindow
from rollout.renderer import EpisodeRenderer, Renderer
from slime_cua.core.types import ImageRef
from slime_cua.data.expand import ImageProcessorConfig, num_image_tokens

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny_base"


@pytest.mark.parametrize("size_wh", [(640, 384), (1920, 1080), (333, 777), (40, 40)])
def test_the_processor_makes_as_many_tokens_as_are_counted(size_wh: tuple[int, int]) -> None:
    processor = Qwen2VLImageProcessorPil.from_pretrained(str(TINY))
    out = processor(images=[Image.new("RGB", size_wh)], return_tensors="np")
    tokens = int(out["image_grid_thw"].prod()) // processor.merge_size**2
    image = ImageRef(sha256="", width_px=size_wh[0], height_px=size_wh[1])
    assert num_image_tokens(image, ImageProcessorConfig.from_hf(TINY)) == tokens


def test_config_has_attention_in_every_layer_and_heads_that_two_ranks_share() -> None:
    text = AutoConfig.from_pretrained(str(TINY)).text_config
    assert set(text.layer_types) == {"full_attention"}
    assert text.num_attention_heads % 2 == text.num_key_value_heads % 2 == text.vocab_size % 256 == 0
    assert not text.tie_word_embeddings
    rotary = int(text.head_dim * text.rope_parameters["partial_rotary_factor"])
    assert sum(text.rope_parameters["mrope_section"]) == rotary // 2


def test_a_model_of_that_config_reads_a_rendered_prompt_with_its_screenshot() -> None:
    renderer = Renderer(TINY, ActionSpace(), prompt="short")
    episode = EpisodeRenderer(renderer, SlidingWindow())
    episode.start("press the red button.", ImageRef(sha256="s1", width_px=640, height_px=384))
    prompt = episode.prompt()
    pixels = np.random.default_rng(0).integers(0, 255, (384, 640, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil.from_pretrained(str(TINY))
    image = processor(images=[Image.fromarray(pixels)], return_tensors="pt")
    ids = torch.tensor([renderer.expand(prompt.ids, prompt.images)])
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(str(TINY))).eval()
        is_image = (ids == renderer.images.image_token_id).int()
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=is_image, **image).logits
    assert logits.shape == (1, prompt.num_tokens, 3072)
    assert bool(torch.isfinite(logits).all())
