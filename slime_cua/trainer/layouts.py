"""Which layouts a model allows, as data, from its config.json alone: the same table for the check, `slime-cua doctor` and docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_cua.config.trainer import ParallelConfig
from slime_cua.convert import read_config
from slime_cua.core.errors import ConfigError

FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen3": ("full attention",),
    "qwen3_5": ("Qwen3.5", "full attention", "gated delta net", "vision"),
    "qwen3_5_moe": ("Qwen3.5", "full attention", "gated delta net", "vision", "experts"),
    "qwen3_vl": ("full attention", "vision"),
    "qwen3_vl_moe": ("full attention", "vision", "experts"),
}
"""model_type of config.json -> parts. Each has numerics tests; others are refused."""

DIVIDED: tuple[tuple[str, str, str], ...] = (
    ("num_attention_heads", "attention heads", "full attention"),
    ("num_key_value_heads", "key/value heads", "full attention"),
    ("linear_num_key_heads", "gated-delta-net key heads", "gated delta net"),
    ("linear_num_value_heads", "gated-delta-net value heads", "gated delta net"),
    ("intermediate_size", "feed-forward width", "dense"),
    ("moe_intermediate_size", "expert width", "experts without ep"),
    ("shared_expert_intermediate_size", "shared expert's width", "experts"),
)
"""Fields of the text config that tensor parallelism divides: name, meaning, part that has it."""

REFUSED: tuple[tuple[str, str, str], ...] = (
    ("pp", "all", "this build has no pipeline schedule; use tp and dp"),
    (
        "cp",
        "gated delta net",
        "megatron-core 0.16.1 has no context parallelism for gated delta net (tensor_a2a_cp2hp is not in it); use tp",
    ),
    (
        "cp",
        "experts",
        "router replay and the balancing loss count whole sequences; use tp with sequence_parallel",
    ),
    ("cp", "Qwen3.5", "mcore-bridge 1.6.5 builds no Qwen3.5 model with it; use tp with sequence_parallel"),
)
"""Axes that must be 1: axis, part of the model, reason. The first whose part the model has is told; without one the axis is free."""

MAX_TP = 64


@dataclass(frozen=True)
class Axis:
    """One line of the table of a model."""

    name: str
    legal: str
    """Values, as one would type them."""
    reason: str
    """What limits them."""


def parts_of(config: Mapping[str, Any]) -> frozenset[str]:
    """Parts of the model of a config.json that layouts depend on. Raises ConfigError for a family that is not trained here."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"model_type {kind!r} has no trainer here; there is one for {', '.join(FAMILIES)}: convert the model or add the "
            "family with its numerics tests"
        )
    parts = set(FAMILIES[kind])
    text = _text(config)
    if "linear_attention" not in (text.get("layer_types") or ["linear_attention"]):
        parts.discard("gated delta net")
    if "experts" not in parts:
        parts.add("dense")
    return frozenset(parts)


def legal_layouts(config: Mapping[str, Any]) -> tuple[Axis, ...]:
    """The table of one model: which values each axis may take."""
    parts = parts_of(config)
    fields = _divided(config, parts, ParallelConfig())
    experts = num_experts(config)
    tp_reason = ", ".join(f"{name} = {value}" for name, value, _ in fields)
    return (
        Axis("tp", _listed(_legal_tp(fields)), f"divides {tp_reason}"),
        Axis(
            "sequence_parallel",
            "true with tp > 1" if experts else "false, true",
            "required for experts with tp > 1" if experts else "takes effect with tp > 1",
        ),
        Axis(
            "ep",
            _listed(_legal_ep(experts)),
            f"divides num_experts = {experts} and tp x dp" if experts else "no experts",
        ),
        *(_axis(axis, parts) for axis in ("pp", "cp")),
        Axis("dp", "any", "with or without use_distributed_optimizer"),
    )


def layout_faults(
    config: Mapping[str, Any], parallel: ParallelConfig, source: str = "the model"
) -> list[str]:
    """Why `parallel` cannot train the model, one sentence a fault; empty when it can."""
    parts = parts_of(config)
    faults = axis_faults(parallel, parts)
    fields = _divided(config, parts, parallel)
    for name, value, meaning in fields:
        if value % parallel.tp:
            faults.append(
                f"trainer.parallel.tp = {parallel.tp} does not divide {name} = {value} ({meaning}) of {source}; "
                f"legal: {_listed(_legal_tp(fields))}"
            )
    experts = num_experts(config)
    if parallel.ep > 1 and (not experts or experts % parallel.ep):
        faults.append(
            f"trainer.parallel.ep = {parallel.ep} needs a model whose experts ({experts}) it divides; legal: {_listed(_legal_ep(experts))}"
        )
    elif (parallel.tp * parallel.dp) % parallel.ep:
        faults.append(
            f"trainer.parallel.ep = {parallel.ep} does not divide tp x dp = {parallel.tp * parallel.dp}: "
            "experts are spread over those ranks"
        )
    if experts and parallel.tp > 1 and not parallel.sequence_parallel:
        faults.append("trainer.parallel.sequence_parallel must be true for experts with tp > 1")
    return faults


def axis_faults(parallel: ParallelConfig, parts: frozenset[str] = frozenset()) -> list[str]:
    """Faults of the axes that must be 1. parts: of the model; empty: what holds for whatever model it will be."""
    sizes = {"pp": parallel.pp, "cp": parallel.cp}
    reasons = {axis: _refusal(axis, parts) for axis, size in sizes.items() if size > 1}
    return [f"trainer.parallel.{axis} must be 1: {reason}" for axis, reason in reasons.items() if reason]


def check_divisibility(hf_dir: Path | str, parallel: ParallelConfig) -> None:
    """Raise ConfigError with the first reason why the model of `hf_dir` cannot be trained under `parallel`."""
    faults = layout_faults(read_config(hf_dir), parallel, str(hf_dir))
    if faults:
        raise ConfigError(faults[0])


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts a layer; 0 for a dense model."""
    text = _text(config)
    return int(text.get("num_experts") or text.get("num_local_experts") or 0)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def _divided(
    config: Mapping[str, Any], parts: frozenset[str], parallel: ParallelConfig
) -> list[tuple[str, int, str]]:
    """(field, value, meaning) that tp must divide in this model. With ep > 1 each expert is whole on its rank."""
    has = parts | ({"experts without ep"} if "experts" in parts and parallel.ep == 1 else frozenset())
    text = _text(config)
    found = ((name, text.get(name), meaning) for name, meaning, part in DIVIDED if part in has)
    return [(name, value, meaning) for name, value, meaning in found if isinstance(value, int) and value > 0]


def _legal_tp(fields: list[tuple[str, int, str]]) -> list[int]:
    return [n for n in range(1, MAX_TP + 1) if all(value % n == 0 for _, value, _ in fields)]


def _legal_ep(experts: int) -> list[int]:
    return [n for n in range(1, experts + 1) if experts % n == 0] or [1]


def _axis(name: str, parts: frozenset[str]) -> Axis:
    reason = _refusal(name, parts)
    return Axis(name, "1", reason) if reason else Axis(name, "any", "pads each segment to a multiple of 2 cp")


def _refusal(axis: str, parts: frozenset[str]) -> str | None:
    """Why the axis must be 1; None where it is free."""
    found = (reason for name, part, reason in REFUSED if name == axis and part in {"all", *parts})
    return next(found, None)


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
