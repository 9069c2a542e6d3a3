"""A Megatron checkpoint to a Hugging Face folder, a layer at a time: no optimiser is built and no more than a layer and the shards
being filled are in memory.

A checkpoint whose alike layers are stacked (older ones) has its layers read at once.
The model is built without values (memory that nothing has touched takes no room); before the bridge converts a part, the part's
weights are read from the checkpoint, and given up when the next is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import megatron_patches
from slime_cua.config.trainer import TrainerConfig
from slime_cua.convert import check_hf_folder
from slime_cua.core.errors import CheckpointError
from slime_cua.core.ports import free_port
from slime_cua.trainer import checkpoint, runtime
from slime_cua.trainer.folders import check_checksums, find, reading
from slime_cua.trainer.lora import saved_adapters
from slime_cua.trainer.model import PolicyModel


def stream_to_hf(
    saved: Path, hf_dir: Path, target: Path, dtype: str = "source", shows_progress: bool = False
) -> int:
    """Write `target` from the checkpoint `saved` (a step folder, or its parent: the newest); gives the step.

    hf_dir: the folder that the run started from: config, tokenizer, names, dtypes and shards. dtype: as of TrainerRank.export_hf.
    Raises CheckpointError for a checkpoint that is not whole, damaged, or of another model. For one process that is in no job.
    """
    config = TrainerConfig(dtype="fp32")  # holds every dtype that comes in
    tensors = check_hf_folder(hf_dir)
    path, manifest = find(saved)
    if saved_adapters(path)[0]:
        raise CheckpointError(
            f"{path} holds adapters without the scale that merges them: the run's own export has them merged (hf/ in its folder); "
            "for another step restore it in a trainer with the run's trainer.lora and call export_hf"
        )
    check_checksums(path, manifest, manifest["files"])
    layout = runtime.start(config, 0, 1, "127.0.0.1", free_port(), 0)
    try:
        with reading(path), megatron_patches.cpu_scope():
            model = PolicyModel(hf_dir, config, tensors, is_empty=True)
            stream = _cast(_Parts(model, path, manifest).export(shows_progress), tensors, dtype)
            checkpoint.write_hf(stream, hf_dir, target, tensors, layout)
    finally:
        runtime.stop()
    return int(manifest["step"])


def _cast(
    pairs: Iterator[tuple[str, torch.Tensor]], tensors: Any, dtype: str
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in pairs:
        yield name, tensor.to(checkpoint.target_dtype(name, tensors, dtype))


class _Parts:
    """Parts of an empty model, read when the bridge comes to them."""

    def __init__(self, model: PolicyModel, path: Path, manifest: dict[str, Any]) -> None:
        self._model, self._path = model, path
        metadata = checkpoint.layout_of(manifest)
        self._are_layers_apart = metadata["non_homogeneous_layers"]
        self._waiting: dict[str, Any] = model.module.sharded_state_dict(metadata=metadata)
        self._parameters = dict(model.module.named_parameters())
        self._held: list[str] = []

    def export(self, shows_progress: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs; raises CheckpointError when the checkpoint has more or less than the model."""
        bridge = self._model.config.bridge
        before = bridge._convert_pre_process
        layer, after = bridge._set_layer_state, bridge._convert_post_process

        def first(*args: Any) -> Any:
            self._read(lambda name: "visual." in name or ".embedding." in name)
            return before(*args)

        def one(module: Any, state: Any, prefix: str, index: int, to_mcore: bool) -> Any:
            if self._are_layers_apart:
                self._read(lambda name: f"decoder.layers.{index}." in name)
            elif index == 0:
                self._read(lambda name: "decoder.layers." in name)
            return layer(module, state, prefix, index, to_mcore)

        def last(*args: Any) -> Any:
            self._read(lambda name: True)
            return after(*args)

        bridge._convert_pre_process, bridge._set_layer_state, bridge._convert_post_process = first, one, last
        for name, tensor in bridge.export_weights([self._model.module], disable_tqdm=not shows_progress):
            if tensor is not None:
                yield name, tensor.detach()

    def _read(self, is_wanted: Callable[[str], bool]) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from torch.distributed.checkpoint.api import CheckpointException

        for name in self._held:
            if name in self._parameters:
                self._parameters[name].data = torch.empty(0)
        self._held = [name for name in self._waiting if is_wanted(name)]
        part = {name: self._waiting.pop(name) for name in self._held}
        if not part:
            return
        try:
            loaded = dist_checkpointing.load({"model": part}, str(self._path))["model"]
        except (CheckpointingException, CheckpointException, KeyError, RuntimeError, ValueError) as error:
            raise checkpoint.unfitting(self._path, error) from error
        self._model.module.load_state_dict(loaded, strict=False)
