"""Symptom: `import mcore_bridge.model` raises ModuleNotFoundError: triton.
Upstream: mcore_bridge 1.6.5 model/modules/kernels, megatron-core 0.16.1 core/ssm (through inference).
Why:      kernels are decorated with triton.jit at import and never run on CPU; names are enough, and only during that
          import: torch._inductor would take a lasting stub for the real package.
Remove when: mcore-bridge imports its kernels lazily.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from megatron_patches.standin_modules import add_module

NAMES = ("triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice")


class _Anything:
    """Any attribute, any index; as a decorator it returns the function."""

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, index: Any) -> _Anything:
        return _Anything()

    def __call__(self, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]
        return lambda function: function


def is_missing() -> bool:
    """True where triton is not installed."""
    return importlib.util.find_spec("triton") is None


@contextlib.contextmanager
def triton_names() -> Iterator[None]:
    """Inside, `import triton` gives names that do nothing, where triton is not installed."""
    if not is_missing():
        yield
        return
    anything = _Anything()
    for name in NAMES:
        add_module(name, __getattr__=anything.__getattr__)
    try:
        yield
    finally:
        for name in NAMES:
            sys.modules.pop(name, None)
