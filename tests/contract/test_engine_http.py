"""SGLang's HTTP contract as this project uses it. Every test runs against every policy server at hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.contract.engine_requests import (
    body,
    flush,
    generate,
    logps,
    noise,
    png,
    post,
    processor_of,
    shown,
    text_ids,
)


@pytest.fixture
def resumed(engine_url: str) -> Iterator[str]:
    """The engine; unpaused again afterwards, whatever the test did."""
    yield engine_url
    post(engine_url, "/continue_generation").raise_for_status()


def wait_for_running(url: str, count: int) -> None:
    """Until the engine has `count` requests that are not waiting."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        load = httpx.get(f"{url}/get_load").json()[0]
        if load["num_reqs"] - load["num_waiting_reqs"] >= count:
            return
        time.sleep(0.02)
    pytest.fail("the requests did not start in 30 s")


def test_a_generation_returns_ids_logprobs_reason_and_version(engine_url: str) -> None:
    answer = generate(engine_url, text_ids(0, 12), max_new_tokens=6)
    meta = answer["meta_info"]
    triples = meta["output_token_logprobs"]
    assert [triple[1] for triple in triples] == answer["output_ids"]
    assert len(triples) == meta["completion_tokens"] == 6
    assert all(value <= 0 for value, *_ in triples)
    assert meta["prompt_tokens"] == 12
    assert meta["finish_reason"]["type"] == "length"
    assert meta["weight_version"] == httpx.get(f"{engine_url}/model_info").json()["weight_version"]


def test_one_placeholder_an_image_is_expanded_by_the_engine(engine_url: str) -> None:
    image = shown(engine_url)
    ids = [*text_ids(1, 4), *image, *text_ids(2, 5), *image, *text_ids(3, 3)]
    meta = generate(engine_url, ids, [png(0), png(1, 320, 192)])["meta_info"]
    assert meta["prompt_tokens"] == 12 + 2 * 2 + 240 + 60
    assert meta.get("image_tokens") in (None, 300)


def test_the_image_changes_what_is_sampled(engine_url: str) -> None:
    ids = [*text_ids(1, 4), *shown(engine_url), *text_ids(2, 5)]
    one, other = (generate(engine_url, ids, [png(seed)], max_new_tokens=1) for seed in (20, 21))
    again = generate(engine_url, ids, [png(20)], max_new_tokens=1)
    tokens = {one["output_ids"][0], other["output_ids"][0], again["output_ids"][0]}
    assert len(tokens) > 1 or logps(one) != logps(other)


def test_placeholders_without_their_images_are_refused(engine_url: str) -> None:
    image = shown(engine_url)
    reply = post(engine_url, "/generate", **body([30, *image, *image, 31], [png(0)]))
    assert reply.status_code >= 400


def test_the_refusal_of_placeholders_without_images_speaks_of_images(embedded_url: str) -> None:
    image = processor_of(embedded_url).image_token_id
    reply = post(embedded_url, "/generate", **body([1, image, image, 2], [png(0)]))
    assert reply.status_code == 400 and "image" in reply.text


def test_a_stop_string_ends_the_output_and_its_tokens_are_kept(engine_url: str) -> None:
    ids = text_ids(4, 10)
    free = generate(engine_url, ids, sampling_seed=5, max_new_tokens=24, skip_special_tokens=False)
    target = next(c for c in free["text"][3:] if c.isascii() and c.isprintable() and c != " ")
    stopped = generate(
        engine_url,
        ids,
        sampling_seed=5,
        max_new_tokens=24,
        stop=[target],
        no_stop_trim=True,
        skip_special_tokens=False,
    )
    count = len(stopped["output_ids"])
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": target}
    assert stopped["output_ids"] == free["output_ids"][:count]
    assert target in stopped["text"]


def test_a_stop_token_ends_the_output_and_is_its_last_id_unless_stops_are_ignored(engine_url: str) -> None:
    ids = text_ids(4, 10)
    free = generate(engine_url, ids, sampling_seed=6, max_new_tokens=12)["output_ids"]
    stop = free[7]
    how = {"sampling_seed": 6, "max_new_tokens": 12, "stop_token_ids": [stop]}
    stopped = generate(engine_url, ids, **how, ignore_eos=False)
    assert stopped["output_ids"] == free[: free.index(stop) + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert generate(engine_url, ids, **how, ignore_eos=True)["output_ids"] == free


def test_logprobs_are_those_of_the_tempered_distribution(engine_url: str) -> None:
    """log p_T(a) - log p_T(b) = (log p_1(a) - log p_1(b)) / T for any two tokens."""
    ids = text_ids(5, 10)

    def seen(temperature: float) -> dict[int, float]:
        found: dict[int, float] = {}
        for seed in range(40):
            answer = generate(engine_url, ids, temperature=temperature, max_new_tokens=1, sampling_seed=seed)
            found[answer["output_ids"][0]] = logps(answer)[0]
        return found

    plain, tempered = seen(1.0), seen(2.0)
    both = sorted(plain.keys() & tempered.keys())
    assert len(both) >= 2
    a, b = both[0], both[-1]
    tolerance = max(1e-3, 4 * noise(engine_url))
    assert tempered[a] - tempered[b] == pytest.approx((plain[a] - plain[b]) / 2.0, abs=tolerance)


def test_sampling_frequencies_follow_the_reported_logprobs(engine_url: str) -> None:
    ids = text_ids(6, 8)
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(
                lambda seed: generate(engine_url, ids, temperature=0.5, max_new_tokens=1, sampling_seed=seed),
                range(120),
            )
        )
    logp = {answer["output_ids"][0]: logps(answer)[0] for answer in answers}
    top = max(logp, key=lambda token: logp[token])
    p = 2.718281828 ** logp[top]
    share = sum(answer["output_ids"][0] == top for answer in answers) / len(answers)
    assert share == pytest.approx(p, abs=4 * (p * (1 - p) / len(answers)) ** 0.5)


@pytest.mark.parametrize(
    "sampling", [{"top_p": 0.5}, {"top_k": 3}, {"temperature": 0.0}], ids=["top_p", "top_k", "greedy"]
)
def test_logprobs_of_a_cut_distribution_are_refused(embedded_url: str, sampling: dict[str, Any]) -> None:
    reply = post(embedded_url, "/generate", **body(text_ids(0, 4), **sampling))
    assert reply.status_code == 400
    assert "log-probs" in reply.text
    allowed = body(text_ids(0, 4), **sampling) | {"return_logprob": False}
    assert post(embedded_url, "/generate", **allowed).status_code == 200


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [10**9]}, "input_ids"),
        ({"colour": 1}, "colour"),
        ({"sampling_params": {"repetition_penalty": 1.05}}, "repetition_penalty"),
        ({"stream": True}, "stream"),
        ({"input_ids": [30] * 5000}, "max_context_tokens"),
        ({"image_data": ["@@@"]}, r"image_data[0]"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_fault(
    embedded_url: str, change: dict[str, Any], word: str
) -> None:
    reply = post(embedded_url, "/generate", **(body(text_ids(0, 4)) | change))
    assert reply.status_code == 400
    assert word in reply.text


def test_concurrent_requests_give_what_each_gives_alone(engine_url: str) -> None:
    image = shown(engine_url)
    requests = [
        ([*text_ids(10 + i, 5 + 3 * i), *image, *text_ids(30 + i, 4)], [png(i)]) if i % 2
        else (text_ids(50 + i, 20 + i), [])
        for i in range(6)
    ]  # fmt: skip
    alone = [generate(engine_url, *request, sampling_seed=i) for i, request in enumerate(requests)]
    flush(engine_url)
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(generate, engine_url, *r, sampling_seed=i) for i, r in enumerate(requests)]
    for call, expected in zip(calls, alone, strict=True):
        assert call.result()["output_ids"] == expected["output_ids"]
        assert logps(call.result()) == pytest.approx(logps(expected), abs=noise(engine_url))


def test_the_next_turn_of_a_session_reuses_what_is_cached(engine_url: str) -> None:
    image = shown(engine_url)
    ids = [*text_ids(60, 30), *image, *text_ids(61, 10)]
    first = generate(engine_url, ids, [png(5)], sampling_seed=1)
    longer = [*ids, *first["output_ids"], *text_ids(62, 6), *image, *text_ids(63, 4)]
    second = generate(engine_url, longer, [png(5), png(6)])
    assert second["meta_info"]["cached_tokens"] >= 0.8 * first["meta_info"]["prompt_tokens"]
    flush(engine_url)
    afresh = generate(engine_url, longer, [png(5), png(6)], sampling_seed=1)
    assert afresh["meta_info"]["cached_tokens"] == 0
    flush(engine_url)
    generate(engine_url, ids, [png(5)], sampling_seed=1)
    cached = generate(engine_url, longer, [png(5), png(6)], sampling_seed=1)
    assert cached["meta_info"]["cached_tokens"] > 0
    assert cached["output_ids"] == afresh["output_ids"]
    assert logps(cached) == pytest.approx(logps(afresh), abs=noise(engine_url))


def test_another_image_of_the_same_size_is_not_taken_from_the_cache(engine_url: str) -> None:
    ids = [*text_ids(64, 20), *shown(engine_url), *text_ids(65, 10)]
    generate(engine_url, ids, [png(7)])
    other = generate(engine_url, ids, [png(8)], sampling_seed=2)
    assert other["meta_info"]["cached_tokens"] <= 20 + 1
    flush(engine_url)
    assert logps(generate(engine_url, ids, [png(8)], sampling_seed=2)) == pytest.approx(
        logps(other), abs=noise(engine_url)
    )


def test_an_aborted_request_returns_what_it_has(engine_url: str) -> None:
    request = body(text_ids(70, 10), max_new_tokens=3000) | {"rid": "to-abort"}
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(httpx.post, f"{engine_url}/generate", json=request, timeout=60)
        wait_for_running(engine_url, 1)
        time.sleep(0.2)
        post(engine_url, "/abort_request", rid="to-abort").raise_for_status()
        meta = call.result().json()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < meta["completion_tokens"] < 3000
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert meta["weight_version"]


def test_a_pause_ends_running_requests_and_holds_new_ones_until_continue(resumed: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(generate, resumed, text_ids(71, 10), max_new_tokens=3000)
        wait_for_running(resumed, 1)
        post(resumed, "/pause_generation", mode="abort").raise_for_status()
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
        held = pool.submit(generate, resumed, text_ids(72, 10))
        time.sleep(0.5)
        assert not held.done()
        post(resumed, "/continue_generation").raise_for_status()
        assert held.result()["meta_info"]["finish_reason"]["type"] == "length"


def test_a_pause_in_place_goes_on_where_it_stopped(resumed: str) -> None:
    expected = generate(resumed, text_ids(73, 10), max_new_tokens=700, sampling_seed=3)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(generate, resumed, text_ids(73, 10), max_new_tokens=700, sampling_seed=3)
        wait_for_running(resumed, 1)
        post(resumed, "/pause_generation", mode="in_place").raise_for_status()
        time.sleep(0.3)
        assert not call.done()
        post(resumed, "/continue_generation").raise_for_status()
        assert call.result()["output_ids"] == expected["output_ids"]


def test_an_engine_that_is_paused_for_good_answers_within_its_deadline(embedded_url: str) -> None:
    """The engine's own deadline is 60 s here; a client's shorter one ends the request on the engine, too."""
    post(embedded_url, "/pause_generation", mode="abort").raise_for_status()
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{embedded_url}/generate", json=body(text_ids(1, 5)), timeout=0.5)
        deadline = time.monotonic() + 10
        while httpx.get(f"{embedded_url}/get_load").json()[0]["num_reqs"] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert httpx.get(f"{embedded_url}/get_load").json()[0]["num_reqs"] == 0
    finally:
        post(embedded_url, "/continue_generation").raise_for_status()


def test_flushing_while_requests_run_is_refused(embedded_url: str) -> None:
    thread = threading.Thread(
        target=lambda: generate(embedded_url, text_ids(74, 10), max_new_tokens=3000), daemon=True
    )
    thread.start()
    wait_for_running(embedded_url, 1)
    reply = post(embedded_url, "/flush_cache")
    post(embedded_url, "/abort_request", abort_all=True).raise_for_status()
    thread.join()
    assert reply.status_code == 400
    assert "pause" in reply.text


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/model_info", "/server_info", "/get_load"])
def test_information_endpoints_answer(engine_url: str, path: str) -> None:
    assert httpx.get(f"{engine_url}{path}", timeout=60).status_code == 200


def test_retract_is_refused_by_name(embedded_url: str) -> None:
    reply = post(embedded_url, "/pause_generation", mode="retract")
    assert reply.status_code == 400
    assert "abort" in reply.text
