"""The client: same tokens whatever engine answers, pieces stamped with their version, and never a wrong prompt."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from rollout.engines import EngineClient, EnginePolicy, EngineProcess, image_ref
from rollout.engines.routing import rendezvous_order
from slime_cua.config.rollout import SamplingConfig
from slime_cua.core.errors import EngineError, PromptMismatchError
from slime_cua.core.ports import free_port
from tests.contract.conftest import ENGINE_CONFIG
from tests.contract.engine_requests import generate, png, post, processor_of, shown, text_ids

SAMPLING = SamplingConfig(temperature=1.0, max_response_tokens=12)
LONG = SamplingConfig(temperature=0.2, max_response_tokens=700)
"""Cold, so that random weights seldom sample a stop."""


def client_of(*urls: str, model_url: str, timeout_s: float = 60) -> EngineClient:
    return EngineClient(urls, processor_of(model_url), request_timeout_s=timeout_s)


async def test_a_generation_has_ids_logprobs_and_a_version_each(engine_url: str) -> None:
    ids = [*text_ids(0, 5), *shown(engine_url), *text_ids(1, 5)]
    async with client_of(engine_url, model_url=engine_url) as client:
        got = await client.generate(ids, [png(0)], SAMPLING, session="a", seed=1)
    assert len(got.ids) == len(got.logp) == len(got.versions) > 0
    assert got.prompt_tokens == 10 + 2 + 240
    assert set(got.versions) == {version_of(engine_url)}
    assert got.finish_reason in ("stop", "length") and got.num_pieces == 1


async def test_the_episode_side_port_gives_the_same(engine_url: str) -> None:
    data = png(0)
    async with client_of(engine_url, model_url=engine_url) as client:
        policy = EnginePolicy(client, SAMPLING)
        ids = [*text_ids(0, 5), *shown(engine_url), 30]
        sampled = await policy.generate(ids, [(image_ref(data), data)], session="a")
    assert len(sampled.ids) == len(sampled.versions) and sampled.prompt_tokens == 248


async def test_a_response_never_goes_past_an_image_placeholder(engine_url: str) -> None:
    """It would be a prompt with more placeholders than images."""
    image = processor_of(engine_url).image_token_id
    async with client_of(engine_url, model_url=engine_url) as client:
        sampling = SamplingConfig(temperature=1.0, max_response_tokens=300)
        for seed in range(8):
            got = await client.generate(text_ids(seed, 6), [], sampling, seed=seed)
            assert image not in got.ids[:-1]


async def test_a_turn_that_an_update_interrupts_goes_on_as_if_nothing_had_happened(embedded_url: str) -> None:
    """Same weights before and after, so the pieces together are the uninterrupted response."""
    before = version_of(embedded_url)
    sampling = LONG
    ids = next_long(embedded_url, sampling)
    try:
        async with client_of(embedded_url, model_url=embedded_url) as client:
            whole = await client.generate(ids, [], sampling, seed=9)
            turn = asyncio.create_task(client.generate(ids, [], sampling, seed=9))
            await wait_for(lambda: running(embedded_url) > 0)
            await asyncio.to_thread(post, embedded_url, "/pause_generation", mode="abort")
            await asyncio.to_thread(post, embedded_url, "/update_weight_version", new_version="17")
            await asyncio.to_thread(post, embedded_url, "/continue_generation")
            got = await turn
    finally:
        post(embedded_url, "/update_weight_version", new_version=str(before)).raise_for_status()
    assert got.num_pieces == 2
    assert got.ids == whole.ids
    assert got.logp == pytest.approx(whole.logp, abs=2e-4)
    assert list(got.versions) == sorted(got.versions, key=lambda v: v == 17)
    assert set(got.versions) == {before, 17}


async def test_an_engine_that_counts_the_prompt_otherwise_is_caught(embedded_url: str) -> None:
    image = processor_of(embedded_url).image_token_id
    coarser = dataclasses.replace(processor_of(embedded_url), merge_size=4)
    async with EngineClient([embedded_url], coarser, request_timeout_s=30) as client:
        with pytest.raises(PromptMismatchError, match="prompt tokens"):
            await client.generate([5 + 20, image, 30], [png(0)], SAMPLING)


async def test_a_refused_request_is_an_error_at_once_with_the_engines_words(embedded_url: str) -> None:
    began = time.monotonic()
    async with client_of(embedded_url, model_url=embedded_url) as client:
        with pytest.raises(EngineError, match="max_context_tokens"):
            await client.generate(text_ids(0, 5000), [], SAMPLING)
    assert time.monotonic() - began < 10


async def test_a_dead_engine_costs_no_request(embedded_url: str) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    firsts = {rendezvous_order(str(i), [dead, embedded_url])[0]: str(i) for i in range(100)}
    assert firsts.keys() == {dead, embedded_url}
    sessions = [*firsts.values()] * 3
    async with client_of(dead, embedded_url, model_url=embedded_url) as client:
        answers = await asyncio.gather(
            *(client.generate(text_ids(i, 6), [], SAMPLING, session=s) for i, s in enumerate(sessions))
        )
    assert all(answer.ids for answer in answers)


async def test_without_any_engine_the_deadline_speaks(embedded_url: str) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    async with client_of(dead, model_url=embedded_url, timeout_s=1.0) as client:
        with pytest.raises(EngineError, match=r"in 1.0 s"):
            await client.generate(text_ids(0, 6), [], SAMPLING, session="x")


async def test_an_engine_killed_in_the_middle_of_a_turn_is_replaced_by_another(
    embedded_url: str, engine_model: Path, tmp_path: Path
) -> None:
    sampling = LONG
    ids = next_long(embedded_url, sampling)
    with EngineProcess(ENGINE_CONFIG, engine_model, tmp_path / "victim.log") as victim:
        async with client_of(victim.url, embedded_url, model_url=embedded_url) as client:
            session = next(
                s for s in map(str, range(99)) if rendezvous_order(s, [victim.url, embedded_url])[0] == victim.url
            )  # fmt: skip
            turn = asyncio.create_task(client.generate(ids, [], sampling, session=session, seed=9))
            await wait_for(lambda: running(victim.url) > 0)
            os.kill(victim.pid, signal.SIGKILL)
            got = await turn
            expected = await client.generate(ids, [], sampling, session=session, seed=9)
    assert got.ids == expected.ids


async def test_a_cancelled_turn_leaves_nothing_running_on_the_engine(embedded_url: str) -> None:
    sampling = LONG
    ids = next_long(embedded_url, sampling)
    async with client_of(embedded_url, model_url=embedded_url) as client:
        turn = asyncio.create_task(client.generate(ids, [], sampling, seed=9))
        await wait_for(lambda: running(embedded_url) > 0)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        await wait_for(lambda: running(embedded_url) == 0)


Script = Callable[..., Awaitable[str]]
asked: list[dict[str, Any]] = []
"""Bodies that scripted servers got, the last one last."""


@pytest.fixture
async def scripted(embedded_url: str) -> AsyncIterator[Script]:
    """Starts a policy server that gives these answers in turn, the last for ever: changes to a right answer's meta_info,
    a status alone, or a whole meta_info under "only"."""
    servers: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

    async def start(*answers: dict[str, Any] | int) -> str:
        app, port = FastAPI(), free_port()
        usual = {
            "finish_reason": {"type": "stop"},
            "prompt_tokens": 6,
            "completion_tokens": 1,
            "cached_tokens": 0,
            "weight_version": "0",
            "output_token_logprobs": [[-1.0, 30, None]],
        }
        left = list(answers)

        @app.post("/generate")
        def generate(body: dict[str, Any]) -> JSONResponse:
            asked.append(body)
            answer = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(answer, int):
                return JSONResponse({"error": {"message": "Request was aborted"}}, answer)
            meta = answer.get("only", {**usual, **answer})
            return JSONResponse({"text": "", "output_ids": [30], "meta_info": meta})

        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
        servers.append((server, asyncio.create_task(server.serve())))
        await wait_for(lambda: server.started)
        return f"http://127.0.0.1:{port}"

    yield start
    for server, task in servers:
        server.should_exit = True
        await task


async def test_a_request_that_a_pause_met_before_its_first_token_is_sent_again(
    embedded_url: str, scripted: Script
) -> None:
    """SGLang answers 499 while the request waits for `continue` or its images are read, and leaves prompt_tokens out when it
    stood in the scheduler's queue. Neither is a refusal, and neither says anything of the prompt."""
    queued = {"finish_reason": {"type": "abort"}, "weight_version": "0", "completion_tokens": 0}
    url = await scripted(499, {"only": queued}, {"weight_version": "5"})
    async with client_of(url, model_url=embedded_url, timeout_s=20) as client:
        answer = await client.generate(text_ids(0, 6), [], SAMPLING)
    assert answer.ids == (30,) and answer.versions == (5,) and answer.num_pieces == 1


async def test_every_request_says_that_nothing_but_the_temperature_shapes_what_is_sampled(
    embedded_url: str, scripted: Script
) -> None:
    url = await scripted({})
    async with client_of(url, model_url=embedded_url) as client:
        await client.generate(text_ids(0, 6), [], SAMPLING)
    params = asked[-1]["sampling_params"]
    assert params["temperature"] == SAMPLING.temperature
    neutral = {
        "top_p": 1,
        "top_k": -1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "repetition_penalty": 1,
    }
    assert {name: params[name] for name in neutral} == neutral


async def test_an_engine_that_missed_an_update_is_not_believed(embedded_url: str, scripted: Script) -> None:
    stale, current = await scripted({"weight_version": "3"}), await scripted({"weight_version": "4"})
    async with client_of(stale, current, model_url=embedded_url) as client:
        client.set_engines([stale, current], min_version=4)
        answers = [await client.generate(text_ids(0, 6), [], SAMPLING, session=str(i)) for i in range(8)]
    assert {version for answer in answers for version in answer.versions} == {4}


@pytest.mark.parametrize(
    ("meta", "words"),
    [({"prompt_tokens": 7}, "7 prompt tokens"), ({"output_token_logprobs": []}, "0 log-probs"),
     ({"image_tokens": 240}, "240 image tokens"),
     ({"output_token_logprobs": [[None, 30, None]]}, "against the contract"),
     ({"output_token_logprobs": [[-1.0]]}, "against the contract"),
     ({"output_token_logprobs": [["-inf", 30, None]]}, "not a number"),
     ({"only": {"finish_reason": {"type": "stop"}, "weight_version": "0"}}, "against the contract.*prompt_tokens")],
)  # fmt: skip
async def test_an_answer_against_the_contract_is_an_error(
    embedded_url: str,
    scripted: Script,
    meta: dict[str, Any],
    words: str,
) -> None:
    async with client_of(await scripted(meta), model_url=embedded_url) as client:
        with pytest.raises(EngineError, match=words):
            await client.generate(text_ids(0, 6), [], SAMPLING)


def version_of(url: str) -> int:
    """What the engine says it serves."""
    return int(httpx.get(f"{url}/model_info").json()["weight_version"])


def running(url: str) -> int:
    """Requests on the engine that are not waiting."""
    load = httpx.get(f"{url}/get_load").json()[0]
    return int(load["num_reqs"] - load["num_waiting_reqs"])


async def wait_for(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            if await asyncio.to_thread(condition):
                return
            await asyncio.sleep(0.01)


def next_long(url: str, sampling: SamplingConfig) -> list[int]:
    """A prompt whose response under seed 9 is at least 500 tokens, so that there is time to interrupt it."""
    stop = [processor_of(url).image_token_id]
    for attempt in range(50):
        ids = text_ids(500 + attempt, 7)
        answer = generate(
            url, ids, sampling_seed=9, max_new_tokens=500, stop_token_ids=stop, ignore_eos=False,
            temperature=sampling.temperature,
        )  # fmt: skip
        if len(answer["output_ids"]) == 500:
            return ids
    raise AssertionError("no long response found")
