"""The FLOP count against torch's own counter on tiny models, part by part, and against hand-worked numbers."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slime_cua.trainer.flops import forward_flops, weights_of_a_token
from slime_cua.trainer.sizes import PRESETS, ModelShape, parameters
from tests.unit.test_plan import small

LENGTH, IMAGE_ID = 24, 248056


def run(config, ids, images=(), attention="sdpa"):
    """torch's counts by operator, of a forward of transformers' class; images: grids (rows, columns) of patches."""
    import transformers

    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[config["model_type"]]
    built = getattr(transformers, f"{name}Config")(
        text_config=dict(config["text_config"]), vision_config=dict(config["vision_config"]), image_token_id=6
    )
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    model = model_class._from_config(
        built, attn_implementation=attention, experts_implementation="eager"
    ).eval()
    inputs = {"input_ids": torch.tensor([ids])}
    if images:
        grid = torch.tensor([(1, *image) for image in images])
        inputs["pixel_values"] = torch.randn(int(grid.prod(1).sum()), 1536)
        inputs["image_grid_thw"] = grid
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == 6).long()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs, use_cache=False)
    totals = counter.get_flop_counts()["Global"]
    return {str(op).removeprefix("aten."): number for op, number in totals.items()}


def linear(counts):
    """Matrix products with a weight."""
    return sum(number for name, number in counts.items() if name in ("mm", "addmm"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_linear_layers_and_head_are_what_torch_counts(kind):
    """Gated delta net and experts included: every product with a weight, all rows through the head."""
    config = small(kind)
    shape = ModelShape.from_config(config)
    found = forward_flops(shape, [LENGTH], LENGTH, [])
    assert linear(run(config, list(range(20, 20 + LENGTH)))) == found.projections + found.head


@pytest.mark.filterwarnings("ignore")
def test_attention_is_half_of_what_torch_counts_for_the_whole_square():
    config = small("qwen3_5", layer_types=["full_attention"] * 4)
    ids = list(range(20, 20 + LENGTH))
    # Written out, attention is batched products; fused, torch's counter does not see it on a CPU.
    attention = run(config, ids, attention="eager")["bmm"] - run(config, ids)["bmm"]
    assert attention == 2 * forward_flops(ModelShape.from_config(config), [LENGTH], LENGTH, []).attention


@pytest.mark.filterwarnings("ignore")
def test_the_vision_towers_linear_layers_are_what_torch_counts():
    config = small("qwen3_5")
    shape = ModelShape.from_config(config)
    text = [20] * 8
    with_image = run(config, [*text, *[6] * 6], [(4, 6)])
    plain = run(config, [20] * 14)
    found = forward_flops(shape, [14], 14, [24])
    scores = 4 * shape.vision.depth * shape.vision.hidden * 24**2
    patch = 2 * 24 * shape.vision.hidden * shape.vision.patch_features
    convolution = sum(n for name, n in with_image.items() if "conv" in name) - sum(
        n for name, n in plain.items() if "conv" in name
    )
    assert linear(with_image) - linear(plain) + convolution == found.vision - scores
    assert convolution in (0, patch)


def test_the_27b_does_two_operations_a_weight_and_three_times_that_in_training():
    shape = ModelShape.from_config(PRESETS["Qwen3.5-27B"])
    by_name = {p.name: p.count for p in parameters(shape)}
    weights = weights_of_a_token(shape)
    assert weights["feed-forward"] == by_name["feed-forward"]
    assert weights["attention"] == by_name["attention"]
    small_parts = 48 * (shape.gdn_qkv * shape.gdn_kernel + 2 * shape.gdn_value_heads)
    assert weights["gated delta net"] == by_name["gated delta net"] - small_parts
    found = forward_flops(shape, [1000, 500], 70, [])
    assert found.projections == 2 * 1500 * sum(weights.values())
    assert found.attention == 16 * 2 * 6144 * (1000**2 + 500**2)
    assert found.recurrence == 48 * 1500 * (6 * 48 * 128 * 128 + 2 * 10240 * 4)
    assert found.head == 2 * 70 * 5120 * 248320
    text = found.projections + found.attention + found.recurrence + found.head
    assert found.training(is_vision_frozen=True) == 3 * text
