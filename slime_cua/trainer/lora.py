"""Low-rank adapters on the language model: W x + (alpha / r) B A x, through peft and mcore-bridge's parallel layers.

Only A and B are trained; the rest of the model is frozen and the reference policy is the model with adapters off.
Legend: r rank of an adapter.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slime_cua.config.trainer import LoraConfig, TrainerConfig
from slime_cua.core.errors import CheckpointError, ConfigError
from slime_cua.trainer.folders import check_checksums, find

LAYERS = {
    "attention": ("linear_qkv", "linear_proj", "in_proj", "out_proj"),
    "feed_forward": ("linear_fc1", "linear_fc2"),
}
"""Megatron's names of what `lora.targets` names; gated delta net counts as attention."""
NAME = "default"


def check_lora(config: TrainerConfig, num_experts: int) -> None:
    """Raise ConfigError for adapters that mcore-bridge cannot build."""
    if config.lora.rank and config.reference_model:
        raise ConfigError(
            "trainer.reference_model must be empty with trainer.lora: mcore-bridge cannot read a folder into a model that has "
            "adapters; the reference is then the base model"
        )
    if config.lora.rank and not config.freeze_vision:
        raise ConfigError(
            "trainer.freeze_vision must be true with trainer.lora: adapters are all that is trained, and the vision tower gets none"
        )
    parallel = config.parallel
    is_on_experts = num_experts and "feed_forward" in config.lora.targets
    if config.lora.rank and is_on_experts and parallel.tp > 1 and parallel.ep == 1:
        raise ConfigError(
            "trainer.lora.targets = feed_forward with experts needs trainer.parallel.ep > 1 at tp > 1: an adapter of an "
            "expert is not cut over tensor-parallel ranks; or set targets = [attention]"
        )


def saved_adapters(folder: Path | str) -> tuple[int, tuple[str, ...]]:
    """(rank, targets) of the adapters in a checkpoint (a step folder, or its parent: the newest); (0, ()) for one of whole weights.

    Reads the list of its tensors only. Raises CheckpointError for a checkpoint that is missing or not whole.
    """
    from torch.distributed.checkpoint import FileSystemReader

    path, manifest = find(Path(folder))
    check_checksums(path, manifest, [".metadata"])
    tensors = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    sizes = {name: tuple(getattr(entry, "size", ())) for name, entry in tensors.items() if ".lora_A." in name}
    rows = {size[-2] for size in sizes.values() if len(size) > 1}
    targets = tuple(
        target
        for target, layers in LAYERS.items()
        if any(f".{layer}.lora_A." in name for layer in layers for name in sizes)
    )
    return max(rows, default=0), targets


def check_saved(folder: Path | str, section: LoraConfig) -> None:
    """Raise CheckpointError for a checkpoint whose adapters are not those that `section` asks for."""
    rank, targets = saved_adapters(folder)
    if (rank, set(targets)) == (section.rank, set(section.targets) if section.rank else set()):
        return
    holds = f"adapters of rank {rank} on {', '.join(targets)}" if rank else "whole weights and no adapters"
    asked = f"rank {section.rank} on {', '.join(section.targets)}" if section.rank else "no adapters (rank 0)"
    way_out = (
        "set trainer.lora as the run had it that wrote the checkpoint"
        if rank
        else "leave trainer.lora out, or make a folder of it (slime-cua convert to-hf) and start from that"
    )
    raise CheckpointError(f"{folder} holds {holds}, trainer.lora asks for {asked}: {way_out}")


class Adapters:
    """Adapters of a built model whose weights are loaded."""

    def __init__(self, module: torch.nn.Module, section: LoraConfig, seed: int = 0) -> None:
        import mcore_bridge.tuners  # noqa: F401  (teaches peft the parallel layers)
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model

        names = "|".join(name for target in section.targets for name in LAYERS[target])
        peft_config = PeftConfig(
            r=section.rank,
            lora_alpha=section.alpha,
            lora_dropout=0.0,
            # A text model is its own language model.
            target_modules=rf"(language_model\.)?decoder\..*\.({names})",
            bias="none",
        )
        try:
            inject_adapter_in_model(peft_config, module, adapter_name=NAME)
        except ValueError as error:
            raise ConfigError(
                f"trainer.lora.targets = {list(section.targets)} cannot have adapters in this model: {error}"
            ) from error
        self._layers: dict[str, Any] = {
            name: m
            for name, m in module.named_modules()
            if hasattr(m, "lora_A") and hasattr(m, "is_parallel_a")
        }
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(".lora_A." in name or ".lora_B." in name)
        self._is_merged = False
        for name, layer in self._layers.items():
            _initialise(name, layer, seed)

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Base weights stand for W + (alpha / r) B A inside; afterwards they are the very same tensors as before."""
        assert not self._is_merged, (
            "weights are being read merged already: read that export to its end, or close it"
        )
        kept: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._is_merged = True
        try:
            for layer in self._layers.values():
                for weight, delta in zip(
                    _weights(layer.base_layer), layer.get_delta_weights(NAME), strict=True
                ):
                    kept.append((weight, weight.data))
                    weight.data = (weight.data.float() + delta.float()).to(weight.dtype)
            yield
        finally:
            self._is_merged = False
            for weight, data in kept:
                weight.data = data

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """The base model alone inside. Without gradients only."""
        assert not torch.is_grad_enabled()
        for layer in self._layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer._disable_adapters = False


def _weights(layer: Any) -> list[torch.nn.Parameter]:
    if hasattr(layer, "num_gemms"):
        return [getattr(layer, f"weight{i}") for i in range(layer.num_gemms)]
    return [layer.weight]


def _initialise(name: str, layer: Any, seed: int) -> None:
    """A uniform in +-1 / sqrt(columns), B zero. Drawn whole by name and cut, so that no layout enters."""
    from megatron.core import mpu

    a, b = layer.lora_A[NAME], layer.lora_B[NAME]
    first_expert = 0
    if layer.is_grouped:
        first_expert = mpu.get_expert_model_parallel_rank() * a.num_gemms
    is_cut = layer.is_parallel_a and not layer.is_expert
    size = mpu.get_tensor_model_parallel_world_size() if is_cut else 1
    rank = mpu.get_tensor_model_parallel_rank() if is_cut else 0
    for index, weight in enumerate(_weights(a)):
        rows, columns = weight.shape[0], weight.shape[1] * size
        key = f"{name}/{first_expert + index}/{seed}"
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        whole = (torch.rand(rows, columns, generator=generator) * 2 - 1) / columns**0.5
        with torch.no_grad():
            weight.copy_(whole.chunk(size, dim=1)[rank])
    for weight in _weights(b):
        torch.nn.init.zeros_(weight)
