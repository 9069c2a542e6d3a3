"""Helper of the stand-ins: put modules made of plain attributes into sys.modules."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any


def add_module(name: str, **attributes: Any) -> types.ModuleType:
    """Create module `name` with a spec (find_spec raises without one), as a child of its parent package."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    for key, value in attributes.items():
        setattr(module, key, value)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module
