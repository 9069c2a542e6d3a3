"""Low-rank adapters on the language model: W x + (alpha / r) B A x, through peft and mcore-bridge's parallel layers.

Only A and B are trained; the rest of the model is frozen and the reference policy is the model with adapters off.
Legend: r rank of an adapter.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from slime_cua.config.trainer import LoraConfig, TrainerConfig
from slime_cua.core.errors import ConfigError

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
    parallel = config.parallel
    is_on_experts = num_experts and "feed_forward" in config.lora.targets
    if config.lora.rank and is_on_experts and parallel.tp > 1 and parallel.ep == 1:
        raise ConfigError(
            "trainer.lora.targets = feed_forward with experts needs trainer.parallel.ep > 1 at tp > 1: an adapter of an "
            "expert is not cut over tensor-parallel ranks; or set targets = [attention]"
        )


class Adapters:
    """Adapters of a built model whose weights are loaded."""

    def __init__(self, module: torch.nn.Module, section: LoraConfig, seed: int = 0) -> None:
        import mcore_bridge.tuners  # noqa: F401  (teaches peft the parallel layers)
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model

        names = "|".join(name for target in section.targets for name in LAYERS[target])
        inject_adapter_in_model(
            PeftConfig(
                r=section.rank,
                lora_alpha=section.alpha,
                lora_dropout=0.0,
                target_modules=rf"language_model\..*\.({names})",
                bias="none",
            ),
            module,
            adapter_name=NAME,
        )
        self._layers: dict[str, Any] = {
            name: m
            for name, m in module.named_modules()
            if hasattr(m, "lora_A") and hasattr(m, "is_parallel_a")
        }
        if not self._layers:
            raise ConfigError(
                f"trainer.lora.targets = {list(section.targets)} matches no layer of this model"
            )
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(".lora_A." in name or ".lora_B." in name)
        for name, layer in self._layers.items():
            _initialise(name, layer, seed)

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Base weights stand for W + (alpha / r) B A inside; afterwards they are the very same tensors as before."""
        kept: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        try:
            for layer in self._layers.values():
                for weight, delta in zip(
                    _weights(layer.base_layer), layer.get_delta_weights(NAME), strict=True
                ):
                    kept.append((weight, weight.data))
                    weight.data = (weight.data.float() + delta.float()).to(weight.dtype)
            yield
        finally:
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
