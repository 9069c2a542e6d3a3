"""Weights reach engines whole or not at all, and nothing of the old ones stays."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout.embedded.random_model import write_random_model
from rollout.engines import EngineProcess
from slime_cua.core.errors import CheckpointError
from slime_cua.trainer.publisher import BroadcastPublisher, DiskPublisher, WeightPublisher
from tests.contract.conftest import ENGINE_CONFIG, MODEL_SPEC
from tests.contract.engine_requests import generate, logps, png, post, processor_of, text_ids

OTHER_SEED = 7


@pytest.fixture(scope="module")
def engines(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """Two engines of this module's own."""
    folder = tmp_path_factory.mktemp("weights")
    started = [EngineProcess(ENGINE_CONFIG, engine_model, folder / f"{i}.log") for i in range(2)]
    try:
        for engine in started:
            engine.start()
        yield started
    finally:
        for engine in started:
            engine.stop()


@pytest.fixture(scope="module")
def old(engine_model: Path) -> dict[str, Tensor]:
    return load_file(engine_model / "model.safetensors")


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("new"), replace(MODEL_SPEC, seed=OTHER_SEED))


@pytest.fixture(scope="module")
def new(new_folder: Path) -> dict[str, Tensor]:
    return load_file(new_folder / "model.safetensors")


def publisher_of(kind: str, folder: Path) -> WeightPublisher:
    return DiskPublisher(folder) if kind == "disk" else BroadcastPublisher(bucket_bytes=1 << 17, timeout_s=20)


def checksums(url: str) -> dict[str, str]:
    found: dict[str, str] = post(url, "/weights_checker", action="checksum").json()["payload"]["checksums"]
    return found


def version(url: str) -> str:
    return str(httpx.get(f"{url}/model_info").json()["weight_version"])


@pytest.mark.parametrize("kind", ["disk", "broadcast"])
def test_a_publish_gives_every_engine_the_new_weights_and_nothing_of_the_old_cache(
    kind: str,
    engines: list[EngineProcess],
    old: dict[str, Tensor],
    new: dict[str, Tensor],
    new_folder: Path,
    tmp_path: Path,
) -> None:
    urls = [engine.url for engine in engines]
    image = processor_of(urls[0]).image_token_id
    ids = [*text_ids(80, 20), image, *text_ids(81, 6)]
    publisher = publisher_of(kind, tmp_path)
    try:
        first = publisher.publish(old.items(), 3, urls)
        before = [generate(url, ids, [png(1)], sampling_seed=1) for url in urls]
        assert all(generate(url, ids, [png(1)])["meta_info"]["cached_tokens"] > 0 for url in urls)
        second = publisher.publish(iter(new.items()), 4, urls)
    finally:
        publisher.close()
    assert first.failures == {} and second.failures == {}
    assert second.engines == tuple(urls) and second.num_tensors == len(new)
    assert second.num_bytes == sum(tensor.nbytes for tensor in new.values())
    assert set(second.seconds) >= {"pause", "flush", "transfer", "check", "version", "continue", "paused"}
    with EngineProcess(ENGINE_CONFIG, new_folder, tmp_path / "reference.log") as reference:
        expected = generate(reference.url, ids, [png(1)], sampling_seed=1)
    for url, stale in zip(urls, before, strict=True):
        fresh = generate(url, ids, [png(1)], sampling_seed=1)
        assert fresh["meta_info"]["cached_tokens"] == 0
        assert fresh["meta_info"]["weight_version"] == "4"
        assert stale["meta_info"]["weight_version"] == "3"
        assert fresh["output_ids"] == expected["output_ids"]
        assert logps(fresh) == pytest.approx(logps(expected), abs=1e-4)
        assert logps(fresh) != pytest.approx(logps(stale), abs=1e-2)


def test_a_publish_aborts_what_runs_and_each_piece_has_its_one_version(
    engines: list[EngineProcess], old: dict[str, Tensor], tmp_path: Path
) -> None:
    url = engines[0].url
    publisher = DiskPublisher(tmp_path)
    publisher.publish(old.items(), 10, [url])
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, url, text_ids(82, 10), max_new_tokens=3000)
        time.sleep(0.5)
        publisher.publish(old.items(), 11, [url])
        piece = running.result()
    assert piece["meta_info"]["finish_reason"]["type"] == "abort"
    assert piece["meta_info"]["weight_version"] == "10"
    rest = generate(url, text_ids(82, 10))
    assert rest["meta_info"]["weight_version"] == "11"


@pytest.mark.parametrize("fault", ["unknown", "shape", "nan", "missing"])
def test_a_wrong_tensor_is_named_and_no_weight_changes(
    fault: str, engines: list[EngineProcess], old: dict[str, Tensor], tmp_path: Path
) -> None:
    url, name = engines[0].url, "lm_head.weight"
    wrong = {key: torch.zeros_like(tensor) for key, tensor in old.items()}
    if fault == "unknown":
        name = "model.language_model.layers.9.mlp.gate_proj.weight"
        wrong[name] = torch.zeros(2, 2)
    elif fault == "shape":
        wrong[name] = torch.zeros(3, 3)
    elif fault == "nan":
        wrong[name][0, 0] = float("nan")
    else:
        del wrong[name]
    save_file(wrong, tmp_path / "model.safetensors")
    before, serves = checksums(url), version(url)
    post(url, "/pause_generation", mode="abort").raise_for_status()
    reply = post(url, "/update_weights_from_disk", model_path=str(tmp_path), weight_version="99")
    post(url, "/continue_generation").raise_for_status()
    assert reply.status_code == 400 and reply.json()["success"] is False
    assert name in reply.json()["message"]
    assert checksums(url) == before and version(url) == serves


def test_a_broadcast_with_an_unknown_name_leaves_the_engine_out_of_traffic_until_it_is_whole(
    engines: list[EngineProcess], old: dict[str, Tensor], new: dict[str, Tensor]
) -> None:
    url = engines[0].url
    publisher = BroadcastPublisher(bucket_bytes=1 << 17, timeout_s=20)
    try:
        extra = {**new, "model.visual.surprise": torch.zeros(4)}
        report = publisher.publish(extra.items(), 21, [url])
        assert "model.visual.surprise" in report.failures[url] and report.engines == ()
        assert post(url, "/continue_generation").status_code == 400
        assert version(url) != "21"
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/generate", json={"input_ids": text_ids(0, 4)}, timeout=0.5)
        again = publisher.publish(old.items(), 22, [url])
    finally:
        publisher.close()
    assert again.failures == {}
    assert generate(url, text_ids(0, 4))["meta_info"]["weight_version"] == "22"


def test_a_transfer_that_lacks_a_tensor_fails_the_check(
    engines: list[EngineProcess], old: dict[str, Tensor], new: dict[str, Tensor]
) -> None:
    url = engines[0].url
    publisher = BroadcastPublisher(timeout_s=20)
    try:
        fewer = {name: tensor for name, tensor in new.items() if name != "lm_head.weight"}
        report = publisher.publish(fewer.items(), 31, [url])
        assert "lm_head.weight was not sent" in report.failures[url]
        assert post(url, "/continue_generation").status_code == 400
        assert publisher.publish(old.items(), 32, [url]).failures == {}
    finally:
        publisher.close()


def test_an_update_while_requests_run_is_refused(engines: list[EngineProcess], new_folder: Path) -> None:
    url = engines[0].url
    before = checksums(url)
    thread = threading.Thread(target=generate, args=(url, text_ids(83, 10)), kwargs={"max_new_tokens": 3000})
    thread.start()
    time.sleep(0.5)
    reply = post(url, "/update_weights_from_disk", model_path=str(new_folder))
    post(url, "/abort_request", abort_all=True).raise_for_status()
    thread.join()
    assert reply.status_code == 400 and "pause" in reply.json()["message"]
    assert checksums(url) == before


def test_an_engine_that_dies_in_a_publish_is_named_and_the_others_are_mended_by_the_next(
    engines: list[EngineProcess], old: dict[str, Tensor], engine_model: Path, tmp_path: Path
) -> None:
    survivor = engines[0].url
    doomed = EngineProcess(ENGINE_CONFIG, engine_model, tmp_path / "doomed.log")
    doomed.start()
    publisher = BroadcastPublisher(bucket_bytes=1 << 16, timeout_s=20)

    def stream() -> Iterator[tuple[str, Tensor]]:
        for index, (name, tensor) in enumerate(old.items()):
            if index == len(old) // 2:
                doomed.stop()
            yield name, tensor

    try:
        report = publisher.publish(stream(), 41, [survivor, doomed.url])
        assert doomed.url not in report.engines
        again = publisher.publish(old.items(), 42, [survivor])
    finally:
        publisher.close()
        doomed.stop()
    assert again.failures == {}
    assert generate(survivor, text_ids(0, 4))["meta_info"]["weight_version"] == "42"


def test_weights_that_are_not_finite_never_leave_the_trainer(
    engines: list[EngineProcess], old: dict[str, Tensor], tmp_path: Path
) -> None:
    url = engines[0].url
    serves = version(url)
    broken = {**old, "lm_head.weight": torch.full_like(old["lm_head.weight"], float("nan"))}
    with pytest.raises(CheckpointError, match=r"lm_head.weight"):
        DiskPublisher(tmp_path).publish(broken.items(), 51, [url])
    assert version(url) == serves
    assert generate(url, text_ids(0, 4))["meta_info"]["weight_version"] == serves
    assert not (tmp_path / "v51").exists()


def test_a_broadcast_works_beside_the_trainers_own_process_group_and_can_keep_a_checkpoint(
    engines: list[EngineProcess], old: dict[str, Tensor], tmp_path: Path
) -> None:
    url = engines[0].url
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    publisher = BroadcastPublisher(timeout_s=20, keep_folder=tmp_path / "kept")
    try:
        first = publisher.publish(old.items(), 71, [url])
        second = publisher.publish(old.items(), 72, [url])
        torch.distributed.barrier()
    finally:
        publisher.close()
        torch.distributed.destroy_process_group()
    assert first.failures == second.failures == {}
    assert second.folder == tmp_path / "kept" / "v72"
    kept = load_file(second.folder / "model-00000.safetensors")
    assert kept.keys() == old.keys() and all(torch.equal(kept[name], old[name]) for name in old)


def test_a_disk_publish_keeps_whole_checkpoints_of_the_last_versions(
    engines: list[EngineProcess], old: dict[str, Tensor], tmp_path: Path
) -> None:
    publisher = DiskPublisher(tmp_path, keep=2, shard_bytes=1 << 18)
    for number in (61, 62, 63):
        report = publisher.publish(old.items(), number, [engines[0].url])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v62", "v63"]
    assert report.folder == tmp_path / "v63"
    index = json.loads((tmp_path / "v63" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == old.keys()
    assert len(set(index["weight_map"].values())) > 1
