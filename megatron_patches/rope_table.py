"""Symptom: after a Megatron model was built, transformers' from_pretrained dies: "'Qwen3_5TextConfig' object has no attribute
         'rope_theta'".
Upstream: mcore_bridge 1.6.5 model/rope.py, get_rope_inv_freq.
Why:      it writes its own 'default' into transformers' global ROPE_INIT_FUNCTIONS. Its own models need it during the
          call only, so the table is put back after each call.
Remove when: mcore-bridge keeps a table of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import Patch


def install() -> None:
    """Wrap get_rope_inv_freq wherever mcore-bridge imported it."""
    import mcore_bridge.model.gpt_model as gpt_model
    import mcore_bridge.model.rope as rope

    wrapped = _keeping_table(rope.get_rope_inv_freq)
    rope.get_rope_inv_freq = wrapped
    gpt_model.get_rope_inv_freq = wrapped


def _keeping_table(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        before = dict(ROPE_INIT_FUNCTIONS)
        try:
            return function(*args, **kwargs)
        finally:
            ROPE_INIT_FUNCTIONS.clear()
            ROPE_INIT_FUNCTIONS.update(before)

    return call


PATCH = Patch(
    name="rope_table",
    phase="after_import",
    symptom="mcore-bridge overwrites transformers' rope table; it is put back",
    install=install,
)
