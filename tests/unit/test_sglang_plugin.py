"""What the plugin changes inside an SGLang server, on doubles of the objects that it hooks."""

from __future__ import annotations

import asyncio
import configparser
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.engines.commands import SGLANG_SITE
from slime_cua.convert.weight_stream import tensor_digest


@pytest.fixture
def plugin() -> Iterator[Any]:
    """A fresh copy of the module: it keeps what it received."""
    spec = importlib.util.spec_from_file_location("slime_cua_sglang", SGLANG_SITE / "slime_cua_sglang.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def test_the_entry_point_names_the_function_that_registers(plugin: Any) -> None:
    parser = configparser.ConfigParser()
    parser.read(SGLANG_SITE / "slime_cua_engine-1.0.dist-info" / "entry_points.txt")
    module, function = parser["sglang.srt.plugins"]["slime_cua"].split(":")
    assert module == plugin.__name__ and callable(getattr(plugin, function))


def test_three_positions_a_token_avoid_the_kernel_that_reads_one(plugin: Any) -> None:
    layer = SimpleNamespace(forward_prepare_native=lambda positions, hidden: "native")

    def fused(layer: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> str:
        return "fused"

    hidden = torch.zeros(5, 8)
    assert plugin.rotate_by_all_positions(fused, layer, torch.zeros(3, 5), hidden) == "native"
    assert plugin.rotate_by_all_positions(fused, layer, torch.zeros(5), hidden) == "fused"


async def test_a_pause_ends_once_the_running_requests_have(plugin: Any) -> None:
    left = 3
    aborts: list[bool] = []

    async def is_locked() -> bool:
        nonlocal left
        left -= 1
        return left > 0

    async def never(manager: Any, request: Any) -> None:
        raise AssertionError("mode abort must not take SGLang's own way")

    manager = SimpleNamespace(
        is_pause=False,
        is_pause_cond=asyncio.Condition(),
        model_update_lock=SimpleNamespace(is_locked=is_locked),
        abort_request=lambda abort_all: aborts.append(abort_all),
    )
    await plugin.pause_soon(never, manager, SimpleNamespace(mode="abort"))
    assert manager.is_pause and left == 0 and aborts == [True] * 3


async def test_other_pauses_are_sglangs_own(plugin: Any) -> None:
    seen: list[str] = []

    async def original(manager: Any, request: Any) -> None:
        seen.append(request.mode)

    await plugin.pause_soon(original, SimpleNamespace(), SimpleNamespace(mode="in_place"))
    assert seen == ["in_place"]


def test_features_of_images_go_when_the_vision_tower_changed_and_only_then(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[bool] = []
    monkeypatch.setattr(plugin, "drop_image_features", lambda: dropped.append(True))
    tower, text = "model.visual.blocks.0.norm1.weight", "model.language_model.norm.weight"

    def load(model: Any, weights: Any) -> None:
        for _ in weights:
            pass

    def update(tower_value: float, text_value: float) -> int:
        weights = [(tower, torch.full((3,), tower_value)), (text, torch.full((3,), text_value))]
        plugin.note_received(load, None, weights)
        return len(dropped)

    assert update(1, 1) == 0, "the server's start: there is no feature yet"
    assert update(1, 1) == 1, "what the server read at its start has no digest: it may differ"
    assert update(1, 2) == 1
    assert update(2, 2) == 2


def test_the_cache_that_is_dropped_is_sglangs(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mm_utils = ModuleType("sglang.srt.managers.mm_utils")
    mm_utils.embedding_cache = {"image": "features"}  # type: ignore[attr-defined]
    managers = ModuleType("sglang.srt.managers")
    managers.mm_utils = mm_utils  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", managers)
    plugin.drop_image_features()
    assert mm_utils.embedding_cache == {}
    mm_utils.embedding_cache = None  # type: ignore[attr-defined]
    plugin.drop_image_features()


def test_what_an_update_brings_is_told_by_name_and_digest(plugin: Any) -> None:
    weight = torch.arange(6.0).reshape(2, 3)

    def load(model: Any, weights: Any) -> set[str]:
        return {name for name, _ in weights}

    def checksum(checker: Any, action: str) -> dict[str, Any]:
        return {"checksums": {"qkv_proj.weight": "abc"}}

    assert plugin.note_received(load, None, iter([("a", weight), ("mtp.b", weight)])) == {"a", "mtp.b"}
    at_start = plugin.add_received(checksum, None, "checksum")["checksums"]
    assert at_start == {"qkv_proj.weight": "abc", "received:a": "", "received:mtp.b": ""}
    plugin.note_received(load, None, [("a", weight + 1)])
    later = plugin.add_received(checksum, None, action="checksum")["checksums"]
    assert later["received:a"] == tensor_digest(weight + 1) and later["received:mtp.b"] == ""
