"""An engine of a mixture of experts reports the experts of every token, as transformers' routers choose them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.embedded.random_model import write_random_model
from rollout.engines import EngineClient, EngineProcess
from slime_cua.config.rollout import SamplingConfig
from slime_cua.convert import read_config, routing_shape
from slime_cua.core.errors import EngineError
from tests.contract.conftest import ENGINE_CONFIG, MODEL_SPEC
from tests.contract.engine_requests import png, processor_of, text_ids

SPEC = dataclasses.replace(MODEL_SPEC, num_experts=4, layer_types=("linear_attention", "full_attention"))
SAMPLING = SamplingConfig(temperature=1.0, max_response_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("experts") / "model", SPEC)


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EngineProcess(ENGINE_CONFIG, folder, tmp_path_factory.mktemp("experts") / "engine.log") as engine:
        yield engine.url


def chosen_by_transformers(folder: Path, ids: list[int]) -> np.ndarray:
    """[tokens, layers, experts a token] of one plain forward."""
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[torch.Tensor] = []
    for layer in model.model.language_model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, i, out: found.append(out[2]))
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    return torch.stack(found, dim=1).numpy()


def client_of(url: str, shape: tuple[int, int] | None) -> EngineClient:
    return EngineClient([url], processor_of(url), request_timeout_s=120, routing_shape=shape)


async def test_the_record_is_that_of_transformers_also_for_a_turn_that_continues_a_cached_stream(
    folder: Path, url: str
) -> None:
    shape = routing_shape(read_config(folder))
    assert shape == (2, 2)
    async with client_of(url, shape) as client:
        first = await client.generate(text_ids(0, 30), [], SAMPLING, session="a", seed=1)
        prompt = [*text_ids(0, 30), *first.ids, *text_ids(1, 9)]
        second = await client.generate(prompt, [], SAMPLING, session="a", seed=2)
    assert second.cached_tokens > 0
    for ids, got in ((text_ids(0, 30), first), (prompt, second)):
        assert got.routed_experts is not None
        wanted = chosen_by_transformers(folder, [*ids, *got.ids])[:-1]
        assert np.array_equal(np.sort(got.routed_experts.to_array()), np.sort(wanted))


async def test_image_tokens_have_a_record_each(folder: Path, url: str) -> None:
    image = processor_of(url).image_token_id
    async with client_of(url, (2, 2)) as client:
        got = await client.generate(
            [*text_ids(0, 5), image, *text_ids(1, 5)], [png(0)], SAMPLING, session="b"
        )
    assert got.routed_experts is not None
    assert got.routed_experts.num_tokens == got.prompt_tokens + len(got.ids) - 1


async def test_an_engine_without_experts_and_one_of_another_shape_are_named(
    url: str, embedded_url: str
) -> None:
    async with client_of(embedded_url, (2, 2)) as client:
        with pytest.raises(EngineError, match=r"reports no routed_experts: .*--enable-return-routed-experts"):
            await client.generate(text_ids(0, 5), [], SAMPLING)
    async with client_of(url, (3, 2)) as client:
        with pytest.raises(EngineError, match="of 3 layers and 2 experts a token: it runs another model"):
            await client.generate(text_ids(0, 5), [], SAMPLING)


async def test_nothing_is_reported_to_who_does_not_ask(url: str) -> None:
    async with client_of(url, None) as client:
        got = await client.generate(text_ids(0, 5), [], SAMPLING)
    assert got.routed_experts is None
