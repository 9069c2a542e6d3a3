"""How a checkpoint stores its experts: three layouts are in the world, told apart by names and shapes, never by guess.

Legend: E experts, H hidden size, F width of an expert.

    split   experts.<e>.gate_proj.weight [F, H], up_proj.weight [F, H], down_proj.weight [H, F]
    out_in  experts.gate_up_proj [E, 2F, H], experts.down_proj [E, H, F]    (transformers' own modules, Qwen3.5-MoE)
    in_out  experts.gate_up_proj [E, H, 2F], experts.down_proj [E, F, H]    (Qwen3-VL-MoE as published)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from slime_cua.convert.hf_folder import TensorInfo
from slime_cua.core.errors import CheckpointError

ExpertLayout = Literal["none", "split", "out_in", "in_out"]
_SPLIT = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj)\.weight$")
_FUSED = (".experts.gate_up_proj", ".experts.down_proj")


def expert_layout(table: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> ExpertLayout:
    """The layout of a checkpoint's experts; "none" without any. MTP heads are not looked at.

    table: its tensors. config: its config.json. Raises CheckpointError naming the first tensor that fits no layout, or two
    tensors of different ones.
    """
    text = config.get("text_config") or config
    num = text.get("num_experts") or text.get("num_local_experts")
    hidden, width = text.get("hidden_size"), text.get("moe_intermediate_size")
    first: tuple[ExpertLayout, str] = ("none", "")
    for name in sorted(table):
        if name.startswith("mtp."):
            continue
        layout = _layout_of(name, table[name].shape, (num, hidden, width))
        if layout == "none":
            continue
        if first[0] not in ("none", layout):
            raise CheckpointError(
                f"experts of one checkpoint in two layouts: {first[1]} is {first[0]}, {name} is {layout}; convert it anew"
            )
        first = (layout, name) if first[0] == "none" else first
    return first[0]


def routing_shape(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """(layers, experts a token) of a model's routers, from its config.json; None without experts."""
    text = config.get("text_config") or config
    if not (text.get("num_experts") or text.get("num_local_experts")):
        return None
    return int(text["num_hidden_layers"]), int(text["num_experts_per_tok"])


def _layout_of(name: str, shape: tuple[int, ...], sizes: tuple[Any, Any, Any]) -> ExpertLayout:
    if _SPLIT.search(name):
        return "split"
    if not name.endswith(_FUSED):
        return "none"
    num, hidden, width = sizes
    is_gate = name.endswith(_FUSED[0])
    out_in = (num, 2 * (width or 0), hidden) if is_gate else (num, hidden, width)
    in_out = (out_in[0], out_in[2], out_in[1])
    if shape == out_in == in_out:
        return "none"  # square: the other of the two tensors tells
    if shape in (out_in, in_out):
        return "out_in" if shape == out_in else "in_out"
    raise CheckpointError(
        f"tensor {name} has shape {list(shape)}: neither {list(out_in)} (experts, out, in) nor {list(in_out)} "
        "(experts, in, out), the two ways fused experts are stored; compare num_experts, hidden_size and "
        "moe_intermediate_size of config.json"
    )


def expected_in_layout(
    expected: Mapping[str, tuple[int, ...]], layout: ExpertLayout
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `expected` (layout out_in, as transformers' classes have it) in another layout."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in expected.items():
        if not name.endswith(_FUSED) or layout in ("none", "out_in"):
            found[name] = shape
        elif layout == "in_out":
            found[name] = (shape[0], shape[2], shape[1])
        elif name.endswith(_FUSED[0]):
            stem = name.removesuffix("gate_up_proj")
            half = (shape[1] // 2, shape[2])
            found.update(
                {
                    f"{stem}{e}.{part}.weight": half
                    for e in range(shape[0])
                    for part in ("gate_proj", "up_proj")
                }
            )
        else:
            stem = name.removesuffix("down_proj")
            found.update({f"{stem}{e}.down_proj.weight": shape[1:] for e in range(shape[0])})
    return found
