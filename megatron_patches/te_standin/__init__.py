"""Symptom: mcore-bridge and megatron-core's model specs import Transformer Engine at the top, so no model can be built
         where it is not installed (CPU, a plain CUDA image).
Upstream: mcore_bridge 1.6.5 model/register.py, megatron-core 0.16.1 core/extensions/transformer_engine.py.
Why:      the layers are ordinary mathematics; this package gives the symbols that the two touch in plain torch, on CPU
         and CUDA, with the parameter names, attributes and tensor-parallel behaviour of Transformer Engine 2.11.
Remove when: Transformer Engine installs on every machine the project runs on.
Returns early when the real package is installed.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

from megatron_patches.registry import Patch
from megatron_patches.standin_modules import add_module
from megatron_patches.te_standin import support
from megatron_patches.te_standin.attention import DotProductAttention
from megatron_patches.te_standin.linear import (
    GroupedLinear,
    LayerNormLinear,
    Linear,
    TransformerEngineBaseModule,
)
from megatron_patches.te_standin.norm import LayerNorm, RMSNorm

VERSION = "2.11.0"
"""The version whose interface is stood in for: what megatron-core 0.16.1 branches on."""
ROOT = "transformer_engine"


def is_missing() -> bool:
    """True where the real transformer_engine is not installed."""
    if ROOT in sys.modules:
        return False
    return importlib.util.find_spec(ROOT) is None


def install() -> None:
    """Register the stand-in under the name transformer_engine. Modules left out make megatron take its torch path."""
    add_module(ROOT, __version__=VERSION, IS_STANDIN=True)
    add_module(f"{ROOT}.common")
    add_module(f"{ROOT}.common.recipe", **_recipes())
    torch_side = f"{ROOT}.pytorch"
    fp8 = {"fp8_autocast": support.fp8_autocast, "fp8_model_init": support.fp8_model_init}
    add_module(
        torch_side,
        Linear=Linear,
        LayerNormLinear=LayerNormLinear,
        GroupedLinear=GroupedLinear,
        LayerNorm=LayerNorm,
        RMSNorm=RMSNorm,
        DotProductAttention=DotProductAttention,
        Fp8Padding=support.unavailable("Fp8Padding"),
        Fp8Unpadding=support.unavailable("Fp8Unpadding"),
        **fp8,
    )
    add_module(f"{torch_side}.fp8", FP8GlobalStateManager=support.FP8GlobalStateManager, **fp8)
    add_module(f"{torch_side}.ops", **{n: support.unavailable(n) for n in ("Sequential", "FusibleOperation")})
    add_module(
        f"{torch_side}.distributed",
        CudaRNGStatesTracker=support.CudaRNGStatesTracker,
        checkpoint=support.checkpoint,
        activation_recompute_forward=support.activation_recompute_forward,
    )
    add_module(f"{torch_side}.tensor", QuantizedTensor=type("QuantizedTensor", (), {}))
    add_module(
        f"{torch_side}.attention",
        _SplitAlongDim=support.SplitAlongDim,
        DotProductAttention=DotProductAttention,
    )
    fused = ("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss")
    add_module(f"{torch_side}.router", **dict.fromkeys(fused))
    add_module(f"{torch_side}.module")
    add_module(
        f"{torch_side}.module.base",
        TransformerEngineBaseModule=TransformerEngineBaseModule,
        get_workspace=lambda: None,
    )


def _recipes() -> dict[str, Any]:
    names = (
        "DelayedScaling",
        "Float8CurrentScaling",
        "Float8BlockScaling",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
        "CustomRecipe",
        "Recipe",
    )
    recipes: dict[str, Any] = {name: type(name, (support.Recipe,), {}) for name in names}
    return {**recipes, "Format": types.SimpleNamespace(E4M3=0, HYBRID=1)}


PATCH = Patch(
    name="te_standin",
    phase="before_import",
    symptom="transformer_engine is not installed; plain-torch layers take its place",
    install=install,
    is_needed=is_missing,
)
