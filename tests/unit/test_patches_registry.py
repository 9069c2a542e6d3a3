"""Patches are named, told from versions they were not tried on, and import nothing of the project."""

from __future__ import annotations

import _ctypes
import ast
import os
import shutil
import sys
import types
from pathlib import Path

import pytest

import megatron_patches
from megatron_patches import fla_standin, one_cudnn, registry, te_standin
from megatron_patches.triton_names import is_missing, triton_names

FOLDER = Path(megatron_patches.__file__).parent
HEADINGS = ("Symptom:", "Upstream:", "Why:", "Remove when:")


def test_an_untested_upstream_version_is_refused_with_the_way_out() -> None:
    with pytest.raises(megatron_patches.UntestedVersionError, match=r"megatron-core 0\.17\.0 .* 0\.16\.1"):
        registry.check_versions({"megatron-core": "0.17.0", "mcore_bridge": "1.6.5"})
    registry.check_versions({"megatron-core": "0.16.1", "mcore_bridge": "1.6.5"})


def test_every_patch_says_symptom_upstream_reason_and_end() -> None:
    modules = {path.stem: path for path in FOLDER.glob("*.py")} | {
        "te_standin": FOLDER / "te_standin/__init__.py"
    }
    for name in [patch.name for patch in megatron_patches.PATCHES] + ["triton_names"]:
        text = ast.get_docstring(ast.parse(modules[name].read_text())) or ""
        assert all(heading in text for heading in HEADINGS), name


def test_names_are_unique_and_model_patches_come_after_imports() -> None:
    names = [patch.name for patch in megatron_patches.PATCHES]
    order = ["before_import", "after_import", "model", "gradients"]
    phases = [order.index(patch.phase) for patch in megatron_patches.PATCHES]
    assert len(set(names)) == len(names)
    assert phases == sorted(phases)


def test_only_needed_patches_of_the_phase_run_in_order_and_are_reported() -> None:
    calls: list[str] = []

    def patch(name: str, phase: registry.Phase, is_needed: bool) -> registry.Patch:
        return registry.Patch(name, phase, "symptom", lambda: calls.append(name), lambda: is_needed)

    patches = (
        patch("a", "after_import", True),
        patch("b", "before_import", True),
        patch("c", "after_import", False),
    )
    assert registry.run(patches, "after_import") == ["a"]
    assert calls == ["a"]


@pytest.mark.skipif(not is_missing(), reason="triton is installed here")
def test_triton_names_exist_inside_the_scope_only() -> None:
    with triton_names():
        import triton
        import triton.language as tl

        @triton.jit
        def kernel(x: tl.constexpr) -> int:
            return 1

        assert kernel(0) == 1
    with pytest.raises(ModuleNotFoundError):
        __import__("triton")


@pytest.mark.parametrize("standin, package", [(te_standin, "transformer_engine"), (fla_standin, "fla")])
def test_a_stand_in_steps_aside_where_the_real_package_is(
    standin: types.ModuleType, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    assert not standin.is_missing()
    assert registry.run((standin.PATCH,), "before_import") == []


def test_transformer_engine_is_shown_the_cudnn_that_torch_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "nvidia/cudnn/lib/libcudnn.so.9"
    library.parent.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.delenv("CUDNN_HOME", raising=False)
    monkeypatch.setattr(te_standin, "is_missing", lambda: False)
    assert not one_cudnn.is_needed()
    shutil.copy(_ctypes.__file__, library)  # any library that loads
    assert one_cudnn.is_needed()
    one_cudnn.install()
    assert os.environ["CUDNN_HOME"] == str(tmp_path / "nvidia/cudnn")
    assert str(library) in Path("/proc/self/maps").read_text()
    assert one_cudnn.is_needed(), "a child inherits the variable and has to load the parts itself"
    monkeypatch.setenv("CUDNN_HOME", "/opt/cudnn")
    assert not one_cudnn.is_needed(), "what a user set stays"
