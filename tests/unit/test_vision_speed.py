"""The vision tower with less overhead gives what transformers' own tower gives, outputs and gradients."""

import numpy as np
import pytest
import torch

from slime_cua.synthesis.initial_weights import InitConfig, draw_positions
from slime_cua.trainer.vision_speed import speed_up_tower


def tower() -> torch.nn.Module:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    config = Qwen3_5VisionConfig(
        depth=1,
        hidden_size=16,
        intermediate_size=32,
        num_heads=2,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=24,
        num_position_embeddings=36,
    )
    torch.manual_seed(3)
    return Qwen3_5VisionModel(config)


def run(module: torch.nn.Module, grids: list[list[int]]) -> list[torch.Tensor]:
    grid_I3 = torch.tensor(grids)
    patches = torch.randn(
        int(grid_I3.prod(1).sum()), 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1)
    )
    output = module(patches, grid_thw=grid_I3).pooler_output
    module.zero_grad()
    output.square().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("grids", [[[1, 4, 6]] * 3, [[1, 4, 6], [1, 2, 2], [1, 4, 6]]])
def test_outputs_and_gradients_are_those_of_the_slow_tower(grids):
    expected = run(tower(), grids)
    fast = tower()
    assert speed_up_tower(fast)
    for _ in range(2):
        for found, wanted in zip(run(fast, grids), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_parameter_names_do_not_change():
    slow, fast = tower(), tower()
    speed_up_tower(fast)
    assert list(slow.state_dict()) == list(fast.state_dict())


def test_other_towers_are_left_alone():
    assert not speed_up_tower(torch.nn.Linear(2, 2))


def test_half_of_the_position_channels_depends_on_the_row_only_and_half_on_the_column():
    table = torch.empty(16 * 16, 32)
    draw_positions(table, InitConfig(), torch.Generator().manual_seed(0))
    grid = table.view(16, 16, 32)
    torch.testing.assert_close(grid[:, :, :16], grid[:, :1, :16].expand(16, 16, 16))
    torch.testing.assert_close(grid[:, :, 16:], grid[:1, :, 16:].expand(16, 16, 16))
    assert abs(float(table.square().mean()) - 1.0) < 0.2


def test_a_linear_map_reads_the_column_off_the_positions():
    table = torch.empty(40 * 40, 128)
    draw_positions(table, InitConfig(), torch.Generator().manual_seed(0))
    column = np.tile(np.arange(40.0), 40)
    solution, *_ = np.linalg.lstsq(table.double().numpy(), column, rcond=1e-6)
    assert np.abs(table.double().numpy() @ solution - column).max() < 0.5
