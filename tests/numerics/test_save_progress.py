"""A rank that writes a checkpoint itself makes progress tensor by tensor: a long write is not taken for a hang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megatron_patches
from slime_cua.trainer import progress
from slime_cua.trainer.save_strategy import Jobs, save_strategy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.mark.parametrize("is_later", [False, True])
def test_each_tensor_leaves_a_mark_unless_a_thread_writes_it_later(tmp_path: Path, is_later: bool) -> None:
    megatron_patches.apply()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    later: Jobs = []
    state = {name: ShardedTensor.from_rank_offsets(name, torch.ones(4)) for name in ("first", "second")}
    (tmp_path / "draft").mkdir()
    progress.open_file(tmp_path / "rank.progress")
    before = progress.read(tmp_path / "rank.progress")[0]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        strategy = save_strategy(later if is_later else None)
        dist_checkpointing.save(state, str(tmp_path / "draft"), strategy)
        for job in later:
            job()
    finally:
        dist.destroy_process_group()
    number, text = progress.read(tmp_path / "rank.progress")
    assert list((tmp_path / "draft").glob("*.distcp"))
    if is_later:
        assert (number, text) == (0, "")
    else:
        assert number >= max(before, 0) + 2 and text in ("writing first", "writing second")
