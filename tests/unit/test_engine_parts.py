"""The embedded engine's small parts: sampling, prefix pool, routing, breakers."""

from __future__ import annotations

import math
import socket
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.embedded.checks import listen
from rollout.embedded.names import find_tensor
from rollout.embedded.prefix import PrefixPool, Sequence
from rollout.embedded.prompt import build_prompt, common_prefix
from rollout.embedded.ragged import KvBuffer, KvShape
from rollout.embedded.sampling import RowSampling, sample, uniform
from rollout.engines.routing import Breakers, rendezvous_order

SHAPE = KvShape(num_layers=1, num_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu"))


def row(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, seed: int = 0, place: int = 0
) -> RowSampling:
    return RowSampling(temperature, top_p, top_k, seed, place)


def test_logprobs_are_of_the_tempered_softmax_and_of_the_sampled_position() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0], [0.5, 2.0, -0.5]])
    ids, logp = sample(logits, [row(2.0), row(0.5)])
    for index, temperature in enumerate((2.0, 0.5)):
        scaled = [float(value) / temperature for value in logits[index]]
        total = math.log(sum(math.exp(value) for value in scaled))
        assert logp[index].item() == pytest.approx(scaled[int(ids[index])] - total, abs=1e-6)


def test_a_rows_sample_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    rows = [row(seed=seed, place=seed) for seed in range(4)]
    together, _ = sample(logits, rows)
    alone = [int(sample(logits[i : i + 1], rows[i : i + 1])[0]) for i in range(4)]
    assert together.tolist() == alone


def test_sampled_frequencies_are_the_probabilities() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    n = 20_000
    ids, _ = sample(probs.log().expand(n, 5), [row(seed=7, place=i) for i in range(n)])
    counts = torch.bincount(ids, minlength=5) / n
    assert counts[4] == 0
    assert (counts - probs).abs().max() < 4 * math.sqrt(0.25 / n)


def test_zero_temperature_takes_the_best_token_and_cuts_keep_only_the_best_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    assert int(sample(logits, [row(0.0)])[0]) == 1
    top_k = {int(sample(logits, [row(5.0, top_k=2, place=i)])[0]) for i in range(200)}
    assert top_k == {1, 3}
    top_p = {int(sample(logits, [row(1.0, top_p=0.6, place=i)])[0]) for i in range(200)}
    assert top_p == {1}


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_uniform_numbers_are_in_the_unit_interval_and_repeat(seed: int, place: int) -> None:
    value = uniform(seed, place)
    assert 0 <= value < 1
    assert value == uniform(seed, place)


def test_uniform_numbers_of_neighbouring_seeds_and_places_are_uncorrelated() -> None:
    grid = np.array([[uniform(seed, place) for place in range(100)] for seed in range(100)])
    assert grid.mean() == pytest.approx(0.5, abs=0.015)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.05


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_common_prefix_is_the_longest_one(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64)) == expected


def test_an_images_tokens_count_rows_and_columns_and_text_goes_on_after_the_longer_side() -> None:
    """Worked by hand: 2 x 3 merged patches after two text tokens."""
    prompt = build_prompt([7, 8, 5, 9], [(1, 4, 6)], ["0" * 64], image_token_id=5, merge_size=2)
    assert prompt.ids_N.tolist() == [7, 8, 5, 5, 5, 5, 5, 5, 9]
    assert prompt.positions_3N.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert prompt.next_position == 6


def filled(length: int) -> KvBuffer:
    kv = KvBuffer(SHAPE, length)
    kv.length = length
    kv.keys[:] = torch.arange(length).float()[None, None, :, None]
    kv.values[:] = 0
    return kv


def test_a_prompt_that_extends_an_idle_sequence_takes_it_over() -> None:
    pool, kv = PrefixPool(SHAPE, 1000), filled(20)
    pool.release(kv, np.arange(20))
    got, reused = pool.acquire(np.arange(30), [])
    assert got is kv and reused == 20
    assert pool.num_tokens == 0


def test_a_prompt_that_shares_a_prefix_copies_it_and_leaves_the_source() -> None:
    pool, kv = PrefixPool(SHAPE, 1000), filled(20)
    pool.release(kv, np.arange(20))
    got, reused = pool.acquire(np.concatenate([np.arange(12), [99] * 5]), [])
    assert got is not kv and reused == got.length == 12
    assert torch.equal(got.keys[:, :, :12], kv.keys[:, :, :12])
    assert pool.num_tokens == 20


def test_a_running_sequence_lends_its_prefix_too() -> None:
    pool, kv = PrefixPool(SHAPE, 1000), filled(20)
    got, reused = pool.acquire(np.arange(15), [Sequence(kv, np.arange(40))])
    assert got is not kv and reused == 14


def test_the_last_prompt_token_is_always_computed() -> None:
    pool = PrefixPool(SHAPE, 1000)
    pool.release(filled(20), np.arange(20))
    assert pool.acquire(np.arange(20), [])[1] == 19


def test_the_pool_drops_the_oldest_over_its_limit_and_everything_when_cleared() -> None:
    pool = PrefixPool(SHAPE, 45)
    for start in (0, 100, 200):
        pool.release(filled(20), np.arange(start, start + 20))
    assert pool.num_tokens == 40
    assert pool.acquire(np.arange(30), [])[1] == 0
    assert pool.acquire(np.arange(200, 230), [])[1] == 20
    pool.clear()
    assert pool.num_tokens == 0


def test_a_sequence_with_running_states_is_continued_at_its_end_only() -> None:
    shape = replace(SHAPE, is_recurrent=True)
    pool, kv = PrefixPool(shape, 1000), filled(20)
    pool.release(kv, np.arange(20))
    assert pool.acquire(np.concatenate([np.arange(12), [99] * 20]), [])[1] == 0
    assert pool.acquire(np.arange(20), [])[1] == 0
    assert pool.acquire(np.arange(30), [Sequence(filled(25), np.arange(40))]) == (kv, 20)


def test_experts_of_a_checkpoint_are_views_into_the_fused_tensors() -> None:
    """Two experts, inner size 3, hidden size 2: the first three rows are the gate's."""
    up, down = torch.arange(24.0).reshape(2, 6, 2), torch.arange(12.0).reshape(2, 2, 3)
    weights = {"m.experts.gate_up_proj": up, "m.experts.down_proj": down, "m.other.weight": torch.ones(1)}
    assert torch.equal(present(find_tensor("m.experts.1.gate_proj.weight", weights)), up[1, :3])
    assert torch.equal(present(find_tensor("m.experts.1.up_proj.weight", weights)), up[1, 3:])
    assert torch.equal(present(find_tensor("m.experts.0.down_proj.weight", weights)), down[0])
    present(find_tensor("m.experts.0.up_proj.weight", weights)).fill_(-1)
    assert (up[0, 3:] == -1).all() and (up[0, :3] >= 0).all()
    for unknown in (
        "m.experts.2.up_proj.weight",
        "m.experts.0.bias",
        "m.experts.x.up_proj.weight",
        "n.weight",
    ):
        assert find_tensor(unknown, weights) is None


def present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def test_the_servers_small_answers_are_sent_at_once() -> None:
    """asyncio turns Nagle's algorithm off only where the socket says that it is TCP; else each answer waits 40 ms."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_losing_an_engine_moves_only_its_own_sessions() -> None:
    urls = [f"http://engine-{i}" for i in range(4)]
    sessions = [f"episode-{i}" for i in range(400)]
    before = {s: rendezvous_order(s, urls)[0] for s in sessions}
    after = {s: rendezvous_order(s, urls[1:])[0] for s in sessions}
    assert all(after[s] == before[s] for s in sessions if before[s] != urls[0])
    shares = [sum(url == first for first in before.values()) for url in urls]
    assert min(shares) > 60


def test_breakers_skip_a_failing_engine_and_never_close_the_whole_fleet() -> None:
    breakers = Breakers(max_failures=2, rest_s=60)
    for _ in range(2):
        breakers.failed("a")
    assert breakers.choose(["a", "b"]) == "b"
    for _ in range(2):
        breakers.failed("b")
    assert breakers.is_resting("a") and breakers.is_resting("b")
    assert {breakers.choose(["a", "b"]), breakers.choose(["a", "b"])} == {"a", "b"}
    breakers.succeeded("b")
    assert breakers.choose(["a", "b"]) == "b"


def test_a_rested_engine_is_tried_once_more() -> None:
    breakers = Breakers(max_failures=1, rest_s=0.0)
    breakers.failed("a")
    assert breakers.choose(["a", "b"]) == "a"
