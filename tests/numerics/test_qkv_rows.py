"""Labelled rows show where queries, gates, keys and values land in Megatron's fused projection; random numbers would hide it.

Four heads over two key/value heads. TP=2 cuts between the groups (test_trainer_layouts has its gradients); TP=4 is refused
(tests/unit/test_layouts.py): the two key/value heads would have to be copied.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_cua.config.trainer import TrainerConfig
from slime_cua.trainer.rank import TrainerRank
from tests.numerics.tiny_models import make_qwen3vl, make_qwen35

QUERY, GATE, KEY, VALUE = 0, 10, 20, 30

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def label(folder: Path, has_gate: bool) -> None:
    """Every row of head h becomes QUERY + h, of its gate GATE + h, of key head g KEY + g, of value head g VALUE + g."""
    tensors = load_file(folder / "model.safetensors")
    stem = "model.language_model.layers.0.self_attn."
    kinds = {"q_proj": [QUERY, GATE] if has_gate else [QUERY], "k_proj": [KEY], "v_proj": [VALUE]}
    for name, bases in kinds.items():
        weight = tensors[f"{stem}{name}.weight"]
        heads = 4 if name == "q_proj" else 2
        labels = torch.tensor([base + head for head in range(heads) for base in bases], dtype=weight.dtype)
        rows = labels.repeat_interleave(len(weight) // len(labels))
        tensors[f"{stem}{name}.weight"] = rows[:, None].expand_as(weight).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("make", "has_gate", "wanted"),
    [
        (make_qwen3vl, False, [0, 1, 20, 30, 2, 3, 21, 31]),
        (make_qwen35, True, [0, 10, 1, 11, 20, 30, 2, 12, 3, 13, 21, 31]),
    ],
    ids=["plain", "with output gate"],
)
def test_rows_of_a_group_stand_together_and_gates_travel_with_their_head(
    make: Callable[[Path], Path], has_gate: bool, wanted: list[int], tmp_path: Path
) -> None:
    folder = make(tmp_path / "model")
    label(folder, has_gate)
    trainer = TrainerRank(TrainerConfig(dtype="fp32"))
    trainer.load(folder)
    fused = trainer.model._text.decoder.layers[0].self_attention.linear_qkv.weight
    head_dim = len(fused) // len(wanted)
    assert (fused == fused[:, :1]).all()
    assert fused[:, 0].tolist() == [label for label in wanted for _ in range(head_dim)]
    source = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, source[name]) for name, tensor in trainer.named_hf_tensors("source"))
    trainer.close()
