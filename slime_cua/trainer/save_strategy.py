"""How Megatron's sharded state reaches the disk: torch's own writer, inside this process.

Megatron's writer spawns processes for each save. That costs 10 s on two cores, and a daemonic process may not do it at all.
The files are the same format (torch_dist).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_strategy() -> Any:
    """A save strategy for megatron.core.dist_checkpointing.save."""
    from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint import save as torch_save

    class InProcess(megatron_torch.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Path | str) -> None:
            keyed, _, _ = megatron_torch._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
            torch_save(
                megatron_torch.mcore_to_pyt_state_dict(keyed, False),
                storage_writer=FileSystemWriter(checkpoint_dir, sync_files=False),
                planner=megatron_torch.MCoreSavePlanner(
                    dedup_replicated_tensors=False, flatten_state_dict=False
                ),
            )

    return InProcess("torch_dist", 1)
