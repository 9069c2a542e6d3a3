"""Checkpoints: Megatron's distributed format for resuming, Hugging Face folders for everybody else.

A checkpoint is a folder step_XXXXXXXX with a manifest in it. It is written under another name, synced and renamed, so a folder
with that name is whole; leftovers of an interrupted save are removed by the next one.
"""

from __future__ import annotations

import collections
import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from slime_cua.convert import PASSED_PREFIXES, TensorInfo, copy_companions
from slime_cua.core.errors import CheckpointError, DamagedCheckpointError
from slime_cua.core.files import write_atomic
from slime_cua.trainer.folders import (
    MANIFEST,
    UNFINISHED,
    check_checksums,
    checksum,
    find,
    latest,
    prune,
    publish,
    reading,
    recover,
    remove_leftovers,
    step_folder,
    whole_or_gone,
)
from slime_cua.trainer.model import PolicyModel
from slime_cua.trainer.optimizer import Optimizer
from slime_cua.trainer.pending_save import PendingSave
from slime_cua.trainer.runtime import Layout
from slime_cua.trainer.save_strategy import Jobs, save_strategy

__all__ = ["latest", "restore", "save", "save_later", "step_folder", "target_dtype", "write_hf"]
LAYERS_APART = "layers_apart"
"""In the manifest: each layer has names of its own, so that one can be read without the others. Older checkpoints stack alike layers."""
HAS_OPTIMIZER = "has_optimizer"
"""In the manifest: false for weights alone, as a conversion writes them. Not there: it has one."""
IS_DISTRIBUTED = "is_optimizer_distributed"
"""In the manifest: trainer.use_distributed_optimizer. Megatron names the optimiser's tensors otherwise with it than without."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_NAMED = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Kept(Protocol):
    """What a rank keeps beside weights and optimiser, e.g. copies of older weights."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any) -> None: ...


def save(
    folder: Path,
    step: int,
    model: PolicyModel,
    optimizer: Optimizer,
    layout: Layout,
    keep: int | None = None,
    kept: Kept | None = None,
) -> Path:
    """Write a checkpoint and give its folder. A collective; the old one of the same step stays until the new is whole.

    keep: afterwards remove all but the newest `keep`, the best and those being read. kept: saved as it is, for the same layout.
    Raises CheckpointError on every rank when any rank could not write (disk full, say); what was there before is untouched.
    """
    target, write = _prepare(folder, step, model, optimizer, layout, keep, kept, None)
    write()
    return target


def save_later(
    folder: Path,
    step: int,
    model: PolicyModel,
    optimizer: Optimizer,
    layout: Layout,
    keep: int | None = None,
    kept: Kept | None = None,
    *,
    group: Any,
) -> PendingSave:
    """As `save`, but only the copy to the host happens now; a thread writes and publishes. A collective.

    group: of the writing threads alone (make_writers_group). One save at a time: wait for the last one first.
    """
    target, write = _prepare(folder, step, model, optimizer, layout, keep, kept, group)
    return PendingSave(target, write, _draft(folder, step))


def _prepare(
    folder: Path,
    step: int,
    model: PolicyModel,
    optimizer: Optimizer,
    layout: Layout,
    keep: int | None,
    kept: Kept | None,
    group: Any,
) -> tuple[Path, Callable[[], None]]:
    """(target, what writes and publishes). With a group everything that moves on has been copied when this returns."""
    from megatron.core import dist_checkpointing

    target, draft = step_folder(folder, step), _draft(folder, step)
    what = f"checkpoint {target}"
    facts = {
        "step": step,
        "optimizer_steps": optimizer.num_steps,
        "world_size": layout.world_size,
        LAYERS_APART: True,
        IS_DISTRIBUTED: optimizer.is_distributed,
    }
    later: Jobs = []

    def make_room() -> None:
        if layout.rank == 0:
            remove_leftovers(folder)
            draft.mkdir(parents=True)

    def collect() -> None:
        dist_checkpointing.save(state, str(draft), save_strategy(later if group is not None else None, group))

    together(make_room, what)
    state = _state(model, optimizer, facts, is_loading=False)
    with whole_or_gone(draft, is_owner=layout.rank == 0):
        together(collect, what)
    own: dict[str, Any] = {**_rank_state(layout), "kept": {} if kept is None else kept.state_dict()}
    if group is not None:
        own = copy.deepcopy(own)

    def write() -> None:
        for job in later:
            job()
        torch.save(own, draft / f"rank_{layout.rank:05d}.pt")

    def finish() -> None:
        if layout.rank == 0:
            publish_checkpoint(draft, target, facts, sums)
            prune(folder, keep)

    sums: dict[str, str] = {}

    def write_and_publish() -> None:
        with whole_or_gone(draft, is_owner=layout.rank == 0):
            together(write, what, group)
            sums.update(checksums(draft, layout, group))
            together(finish, what, group)

    return target, write_and_publish


def _draft(folder: Path, step: int) -> Path:
    return folder / f"{UNFINISHED}step_{step:08d}"


def publish_checkpoint(draft: Path, target: Path, facts: Mapping[str, Any], sums: Mapping[str, str]) -> None:
    """Write the manifest of a draft and put it in its place. sums: of `checksums`."""
    files = {p.name: p.stat().st_size for p in sorted(draft.iterdir())}
    manifest = {**facts, "files": files, "crc32": dict(sorted(sums.items()))}
    write_atomic(draft / MANIFEST, json.dumps(manifest, indent=1).encode())
    publish(draft, target)


def checksums(draft: Path, layout: Layout, group: Any) -> dict[str, str]:
    """Of every file of a draft, each rank its share. A collective."""
    names = sorted(path.name for path in draft.iterdir())
    mine: dict[str, str] = {}
    share = names[layout.rank :: layout.world_size]
    together(lambda: mine.update((name, checksum(draft / name)) for name in share), f"draft {draft}", group)
    found: list[dict[str, str]] = [{} for _ in range(layout.world_size)]
    dist.all_gather_object(found, mine, group=group)
    return {name: value for part in found for name, value in part.items()}


def restore(
    folder: Path, model: PolicyModel, optimizer: Optimizer, layout: Layout, kept: Kept | None = None
) -> int:
    """Load the checkpoint `folder` (a step folder, or its parent: the newest). A collective. Gives the step.

    Raises CheckpointError for one that is missing, incomplete, or of another model, DamagedCheckpointError for one whose bytes
    were changed, before anything is loaded.
    """
    path, manifest = find(folder)
    with reading(path):
        return _restore(path, manifest, model, optimizer, layout, kept)


def _restore(
    path: Path,
    manifest: dict[str, Any],
    model: PolicyModel,
    optimizer: Optimizer,
    layout: Layout,
    kept: Kept | None,
) -> int:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from torch.distributed.checkpoint.api import CheckpointException

    mine = sorted(manifest["files"])[layout.rank :: layout.world_size]
    together(lambda: check_checksums(path, manifest, mine), "", is_saving=False)
    has_optimizer = bool(manifest.get(HAS_OPTIMIZER, True))
    was_distributed = manifest.get(IS_DISTRIBUTED, optimizer.is_distributed)
    if has_optimizer and was_distributed != optimizer.is_distributed:
        raise CheckpointError(
            f"{path} was written with trainer.use_distributed_optimizer = {str(was_distributed).lower()}: continue with the same, "
            "or start from its weights alone (slime-cua convert to-hf)"
        )
    state = _state(model, optimizer if has_optimizer else None, manifest, is_loading=True)
    try:
        loaded = dist_checkpointing.load(state, str(path), strict=StrictHandling.RAISE_ALL)
    except (CheckpointingException, CheckpointException, KeyError, RuntimeError, ValueError) as error:
        raise unfitting(path, error) from error
    model.module.load_state_dict(loaded["model"])
    model.forget_images()
    if has_optimizer:
        optimizer.megatron.load_state_dict(loaded["optimizer"])
        optimizer.num_steps = int(manifest["optimizer_steps"])
    else:
        optimizer.start_anew()
    own_file = path / f"rank_{layout.rank:05d}.pt"
    if manifest["world_size"] == layout.world_size and own_file.is_file():
        own = torch.load(own_file, weights_only=False)
        _set_rank_state(own)
        if kept is not None:
            kept.load_state_dict(own.get("kept", {}))
    return int(manifest["step"])


def unfitting(path: Path, error: object) -> CheckpointError:
    """What to say of a checkpoint whose tensors are not those of the model. Megatron lists hundreds of names: the first ones tell."""
    reason = " ".join(str(error).split())
    reason = reason if len(reason) < 400 else f"{reason[:400]} ..."
    return CheckpointError(
        f"{path} does not fit this model: give the folder of the model that it was written from; {reason}"
    )


def layout_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """How Megatron laid the state of a checkpoint out: in model space, for any layout to read."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "non_homogeneous_layers": bool(manifest.get(LAYERS_APART)),
    }


def _state(
    model: PolicyModel, optimizer: Optimizer | None, manifest: Mapping[str, Any], is_loading: bool
) -> dict[str, Any]:
    """Sharded views of weights and optimiser (None: of weights alone), as `manifest` says they are laid out."""
    metadata = layout_of(manifest)
    weights = model.module.sharded_state_dict(metadata=metadata)
    if optimizer is None:
        return {"model": weights}
    optimizer.allocate_state()
    moments = optimizer.megatron.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": moments}


def _rank_state(layout: Layout) -> dict[str, Any]:
    from megatron.core import tensor_parallel

    state = {"torch": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if layout.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rank_state(state: dict[str, Any]) -> None:
    from megatron.core import tensor_parallel

    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def target_dtype(name: str, table: dict[str, TensorInfo], choice: str) -> torch.dtype:
    """The dtype a tensor is given out in: "source" that of the folder loaded, else "fp32" or "bf16"."""
    if choice != "source":
        return _NAMED[choice]
    return _DTYPES[table[name].dtype]


def write_hf(
    tensors: Iterator[tuple[str, torch.Tensor]],
    source: Path,
    target: Path,
    table: dict[str, TensorInfo],
    layout: Layout,
) -> None:
    """Write a Hugging Face folder: weights sharded as in `source`, every other file copied. All ranks iterate, rank 0 writes.

    Tensors that `source` has and `tensors` does not (multi-token prediction heads) are copied unchanged. Raises
    CheckpointError on every rank when it could not be written; an older `target` is then untouched.
    """

    def write() -> None:
        try:
            if layout.rank == 0:
                _write_folder(tensors, source, target, table)
        finally:
            for _ in tensors:  # the others wait in its collectives
                pass

    together(write, f"Hugging Face folder {target}")


def _write_folder(
    tensors: Iterator[tuple[str, torch.Tensor]], source: Path, target: Path, table: dict[str, TensorInfo]
) -> None:
    from safetensors.torch import save_file

    draft = target.with_name(f"{UNFINISHED}{target.name}")
    recover(target)
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    files: dict[str, dict[str, torch.Tensor]] = {}
    left = collections.Counter(info.file for info in table.values())
    for name, tensor in _with_untouched(tensors, source, table):
        file = table[name].file
        files.setdefault(file, {})[name] = tensor.cpu().contiguous().clone()
        left[file] -= 1
        if left[file] == 0:
            save_file(files.pop(file), draft / file, metadata={"format": "pt"})
            (draft / file).chmod(0o644)
    copy_companions(source, draft)
    index = source / "model.safetensors.index.json"
    if index.is_file():
        shutil.copyfile(index, draft / index.name)
    publish(draft, target)


def together(work: Callable[[], None], what: str, group: Any = None, is_saving: bool = True) -> None:
    """Run `work` on every rank; when it fails on one, CheckpointError on all (DamagedCheckpointError unless is_saving: it was
    reading). Nobody is left waiting."""
    failure: Exception | None = None
    try:
        work()
    except Exception as error:
        failure = error
    reason = None if failure is None else f"{type(failure).__name__}: {failure}"
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason, group=group)
    known = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
    if not known:
        return
    rank, reason = known[0]
    if is_saving:
        raise CheckpointError(
            f"{what} was not written, what was there is kept; rank {rank}: {reason}"
        ) from failure
    raise DamagedCheckpointError(str(reason).partition(": ")[2]) from failure


def _with_untouched(
    tensors: Iterable[tuple[str, torch.Tensor]], source: Path, table: dict[str, TensorInfo]
) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    seen = set()
    for name, tensor in tensors:
        if name not in table:
            raise CheckpointError(f"the model gave a tensor {name} that {source} does not have")
        seen.add(name)
        yield name, tensor
    for name in sorted(set(table) - seen):
        if not name.startswith(PASSED_PREFIXES):
            raise CheckpointError(f"the model gave no tensor {name}, which {source} has: nothing was written")
        with safe_open(source / table[name].file, framework="pt") as file:
            yield name, file.get_tensor(name)
