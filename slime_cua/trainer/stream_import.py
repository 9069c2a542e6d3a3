"""A Hugging Face folder to a Megatron checkpoint of weights, a layer at a time: no optimiser is built and no more than a layer, or
the embedding and the vision tower, is in memory.

The model is built without values (memory that nothing has touched takes no room). torch's writer asks for one tensor after the
other; the part that holds it is then converted from the folder, and given up when the writer comes to the next part.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open

import megatron_patches
from slime_cua.config.trainer import TrainerConfig
from slime_cua.convert import PASSED_PREFIXES, TensorInfo, check_hf_folder
from slime_cua.core.ports import free_port
from slime_cua.trainer import checkpoint, runtime
from slime_cua.trainer.folders import UNFINISHED, remove_leftovers, step_folder
from slime_cua.trainer.model import KEPT_FLOAT32, PolicyModel
from slime_cua.trainer.save_strategy import save_strategy

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def part_of(name: str, num_layers: int) -> int:
    """When the bridge comes to a tensor: 0 with embedding and vision tower, n with layer n - 1, at last with the rest."""
    if "visual." in name or "embedding." in name:
        return 0
    layer = _LAYER.search(name)
    return int(layer[1]) + 1 if layer else num_layers + 1


def stream_to_megatron(
    hf_dir: Path,
    folder: Path,
    dtype: Literal["source", "fp32", "bf16"] = "source",
    shows_progress: bool = False,
) -> Path:
    """Write folder/step_00000000 with the weights of `hf_dir` and give its path; what stood there goes when the new one is whole.

    dtype: of the weights; "source" is fp32 where bf16 would round one of them. A trainer of either dtype and any layout starts
    from it, with a fresh optimiser. Raises CheckpointError or ConfigError for a folder that is not whole, and for a disk that is
    full. For one process that is in no job.
    """
    tensors = check_hf_folder(hf_dir)
    config = TrainerConfig(dtype=lossless_dtype(tensors) if dtype == "source" else dtype)
    target, draft = step_folder(folder, 0), folder / f"{UNFINISHED}{step_folder(folder, 0).name}"
    layout = runtime.start(config, 0, 1, "127.0.0.1", free_port(), 0)
    try:
        with megatron_patches.cpu_scope():
            model = PolicyModel(hf_dir, config, tensors, is_empty=True)

            def write() -> None:
                remove_leftovers(folder)
                draft.mkdir(parents=True)
                _write(_Parts(model, hf_dir, tensors, shows_progress), model, draft)
                facts = {"step": 0, "optimizer_steps": 0, "world_size": 1, checkpoint.LAYERS_APART: True}
                facts[checkpoint.HAS_OPTIMIZER] = False
                checkpoint.publish_checkpoint(draft, target, facts, checkpoint.checksums(draft, layout, None))

            checkpoint.together(write, f"checkpoint {target}")
    finally:
        runtime.stop()
    return target


def _write(parts: _Parts, model: PolicyModel, draft: Path) -> None:
    from megatron.core import dist_checkpointing

    weights = model.module.sharded_state_dict(metadata=checkpoint.layout_of({checkpoint.LAYERS_APART: True}))
    dist_checkpointing.save(
        {"model": weights}, str(draft), save_strategy(order=parts.of, before_read=parts.need)
    )


def lossless_dtype(tensors: Mapping[str, TensorInfo]) -> Literal["fp32", "bf16"]:
    """The smaller dtype of a model that holds all these tensors unrounded. Multi-token prediction heads are not in the model."""
    stored = {
        info.dtype
        for name, info in tensors.items()
        if not name.startswith(PASSED_PREFIXES) and not name.endswith(KEPT_FLOAT32)
    }
    return "bf16" if stored <= {"BF16"} else "fp32"


class _Parts:
    """Parts of an empty model, filled in the order in which the bridge converts them, emptied when the next one is asked for."""

    def __init__(
        self, model: PolicyModel, hf_dir: Path, tensors: dict[str, TensorInfo], shows_progress: bool
    ) -> None:
        self._num_layers = int(model.config.num_layers)
        self._last = self._num_layers + 1
        self._converting = _conversion(model, hf_dir, tensors, shows_progress)
        self._current = -1
        self._storages: dict[int, list[torch.UntypedStorage]] = {}
        for name, parameter in model.module.named_parameters():
            self._storages.setdefault(self.of(name), []).append(parameter.data.untyped_storage())

    def of(self, name: str) -> int:
        """The number of a tensor's part."""
        return part_of(name, self._num_layers)

    def need(self, name: str) -> None:
        """The values of the tensor `name` are there afterwards; those of parts before are not."""
        while self._current < self.of(name):
            for storage in self._storages.pop(self._current, ()):
                storage.resize_(0)
            self._current += 1
            next(self._converting, None)
            if self._current == self._last:
                collections.deque(self._converting, maxlen=0)  # to its end, where it closes its files


def _conversion(
    model: PolicyModel, hf_dir: Path, tensors: dict[str, TensorInfo], shows_progress: bool
) -> Iterator[None]:
    """Each step fills one part: embedding and vision tower, the layers, the final norm and the head."""
    from mcore_bridge.utils.safetensors import LazyTensor

    bridge = model.config.bridge
    bridge._peft_format, bridge._is_saving = False, False
    bridge._source_model_dir, bridge._disable_tqdm = str(hf_dir), not shows_progress
    lazy = {n: LazyTensor(loader=functools.partial(_read, hf_dir / i.file, n)) for n, i in tensors.items()}
    steps = bridge._convert([model.module], lazy, "", True, "Converting: ")
    while True:
        with torch.no_grad(), megatron_patches.cpu_scope():
            try:
                next(steps)
            except StopIteration:
                return
        yield


def _read(path: Path, name: str) -> torch.Tensor:
    """One tensor; its file is mapped no longer than the tensor lives: a mapping keeps what was read of it in memory."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)
