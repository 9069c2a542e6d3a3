"""How Megatron's sharded state reaches the disk: torch's own writer, inside this process, now or later in a thread.

Megatron's writer spawns processes for each save. That costs 10 s on two cores, and a daemonic process may not do it at all.
The files are the same format (torch_dist).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_cua.trainer import progress

Jobs = list[Callable[[], None]]


def save_strategy(
    later: Jobs | None = None,
    group: Any = None,
    order: Callable[[str], int] | None = None,
    before_read: Callable[[str], None] | None = None,
) -> Any:
    """A save strategy for megatron.core.dist_checkpointing.save.

    later: the tensors are copied to the host and the writing is appended here, to be called once. group: process group of the
    writing; one that no other thread uses when it is done later. None: the default group.
    Without it the rank that writes leaves a mark of progress at each tensor; with it whoever waits does (PendingSave).
    order: sorts tensors by name; before_read is called with each name before the tensor is read, one after the other.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint import save as torch_save
    from torch.distributed.checkpoint.planner import WriteItemType

    class Planner(megatron_torch.MCoreSavePlanner):  # type: ignore[misc, name-defined]
        def resolve_data(self, write_item: Any) -> Any:
            if later is None:
                progress.mark(f"writing {write_item.index.fqn}")
            if before_read is not None and write_item.type is not WriteItemType.BYTE_IO:
                before_read(write_item.index.fqn)
            return super().resolve_data(write_item)

    class InProcess(megatron_torch.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Path | str) -> None:
            keyed, _, _ = megatron_torch._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
            if later is not None:
                for item in (item for items in keyed.values() for item in items):
                    if isinstance(item, ShardedTensor) and item.data is not None:
                        item.data = item.data.detach().to("cpu", copy=True)
            state = megatron_torch.mcore_to_pyt_state_dict(keyed, False)
            if order is not None:
                state = dict(sorted(state.items(), key=lambda pair: order(pair[0])))
            # Read ahead, the writer would go through tensors by size.
            ahead: dict[str, Any] = {} if before_read is None else {"per_thread_copy_ahead": 0}

            def write() -> None:
                torch_save(
                    state,
                    storage_writer=FileSystemWriter(checkpoint_dir, sync_files=False, **ahead),
                    planner=Planner(dedup_replicated_tensors=False, flatten_state_dict=False),
                    process_group=group,
                )

            write() if later is None else later.append(write)

    return InProcess("torch_dist", 1)
