"""Which layouts a model allows, from its config.json alone."""

from __future__ import annotations

from pathlib import Path

from slime_cua.config.trainer import ParallelConfig
from slime_cua.convert import read_config
from slime_cua.core.errors import ConfigError

SHARDED = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key/value heads",
    "linear_num_key_heads": "gated-delta-net key heads",
    "linear_num_value_heads": "gated-delta-net value heads",
    "intermediate_size": "feed-forward width",
    "moe_intermediate_size": "expert width",
}
"""Fields that tensor parallelism divides."""


def check_divisibility(hf_dir: Path | str, parallel: ParallelConfig) -> None:
    """Raise ConfigError when tp or ep does not divide what it splits, naming field, value and legal tps."""
    plain = read_config(hf_dir)
    text = plain.get("text_config", plain)
    values = {name: text[name] for name in SHARDED if isinstance(text.get(name), int) and text[name] > 0}
    if "linear_attention" not in (text.get("layer_types") or ["linear_attention"]):
        values = {name: value for name, value in values.items() if not name.startswith("linear_")}
    legal = [n for n in range(1, 65) if all(value % n == 0 for value in values.values())]
    for name, value in values.items():
        if value % parallel.tp:
            raise ConfigError(
                f"trainer.parallel.tp = {parallel.tp} does not divide {name} = {value} ({SHARDED[name]}) of {hf_dir}; "
                f"legal: {', '.join(map(str, legal))}"
            )
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    if parallel.ep > 1 and (not experts or experts % parallel.ep):
        raise ConfigError(
            f"trainer.parallel.ep = {parallel.ep} needs a model whose experts ({experts}) it divides"
        )
    if parallel.ep > 1 and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError("trainer.parallel.sequence_parallel must be true for experts with tp > 1")
