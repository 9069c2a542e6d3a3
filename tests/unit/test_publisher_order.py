"""The order of a publish and what is believed of engines, seen from the engines' side of the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_cua.trainer.publisher import DiskPublisher
from tests.unit.scripted_server import ScriptedServer

WEIGHTS = {"a": torch.ones(2, 3), "b": torch.zeros(4)}
Answer = Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]


class ScriptedEngine(ScriptedServer):
    """An engine that writes down what it is asked; digests weights in a layout of its own, as SGLang does."""

    def __init__(self, digest: str = "x", cached_tokens: int = 0, refuses: str = "") -> None:
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.version = "0"
        self.digest, self.cached_tokens, self.refuses = digest, cached_tokens, refuses
        super().__init__()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asked.append(path)
        self.bodies.append(body)
        if path == self.refuses:
            return 400, {"success": False, "message": "no"}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/weights_checker":
            return 200, {"success": True, "message": "", "payload": {"per_gpu_checksum": self.digest}}
        if path == "/generate":
            return 200, {"meta_info": {"cached_tokens": self.cached_tokens, "weight_version": self.version}}
        return 200, {"success": True}


@pytest.fixture
def start() -> Iterator[Callable[..., ScriptedEngine]]:
    started: list[ScriptedEngine] = []

    def begin(**how: Any) -> ScriptedEngine:
        started.append(ScriptedEngine(**how))
        return started[-1]

    yield begin
    for engine in started:
        engine.close()


def test_engines_are_paused_flushed_updated_checked_and_named_before_they_go_on(
    start: Callable[..., ScriptedEngine], tmp_path: Path
) -> None:
    engine = start()
    report = DiskPublisher(tmp_path).publish(WEIGHTS.items(), 5, [engine.url])
    assert engine.asked == [
        "/generate",
        "/pause_generation",
        "/flush_cache",
        "/update_weights_from_disk",
        "/weights_checker",
        "/update_weight_version",
        "/continue_generation",
        "/generate",
    ]
    assert engine.bodies[1] == {"mode": "abort"}
    assert engine.version == "5" and report.failures == {} and report.engines == (engine.url,)


def test_requests_that_wait_out_the_pause_are_neither_aborted_nor_in_the_way_of_the_flush(
    start: Callable[..., ScriptedEngine], tmp_path: Path
) -> None:
    """SGLang refuses to flush at once while a step is in flight, and aborts what waits if an update asks for it."""
    engine = start()
    DiskPublisher(tmp_path).publish(WEIGHTS.items(), 5, [engine.url])
    assert float(engine.queries["/flush_cache"].removeprefix("timeout=")) > 0
    updates = [b for p, b in zip(engine.asked, engine.bodies, strict=True) if p.startswith("/update_weight")]
    assert len(updates) == 2 and not any(body.get("abort_all_requests") for body in updates)


@pytest.mark.parametrize("path", ["/flush_cache", "/update_weights_from_disk", "/weights_checker"])
def test_an_engine_that_fails_a_phase_is_never_continued_and_does_not_stop_the_others(
    start: Callable[..., ScriptedEngine], tmp_path: Path, path: str
) -> None:
    good, bad = start(), start(refuses=path)
    report = DiskPublisher(tmp_path).publish(WEIGHTS.items(), 5, [bad.url, good.url])
    assert report.engines == (good.url,)
    assert path in report.failures[bad.url]
    assert "/continue_generation" not in bad.asked and bad.version == "0"
    assert "/continue_generation" in good.asked


def test_an_engine_whose_weights_differ_from_its_peers_is_left_out(
    start: Callable[..., ScriptedEngine], tmp_path: Path
) -> None:
    engines = [start(), start(digest="another"), start()]
    report = DiskPublisher(tmp_path).publish(WEIGHTS.items(), 5, [engine.url for engine in engines])
    assert set(report.failures) == {engines[1].url}
    assert "differ" in report.failures[engines[1].url]


def test_an_engine_that_still_has_the_old_prefix_after_an_update_is_paused_again(
    start: Callable[..., ScriptedEngine], tmp_path: Path
) -> None:
    """A prefix cache that outlives its weights shows itself by cached tokens."""
    stale = start(cached_tokens=32)
    report = DiskPublisher(tmp_path).publish(WEIGHTS.items(), 5, [stale.url])
    assert report.engines == ()
    assert "32 cached tokens" in report.failures[stale.url]
    assert stale.asked[-1] == "/pause_generation"


def test_a_run_that_went_back_to_an_older_version_keeps_what_it_just_wrote(tmp_path: Path) -> None:
    publisher = DiskPublisher(tmp_path, keep=2)
    for version in (8, 9, 3):
        report = publisher.publish(WEIGHTS.items(), version, [])
        assert report.folder is not None and report.folder.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v3", "v9"]


def test_a_dead_engine_is_named_and_the_stream_is_still_read_to_its_end(tmp_path: Path) -> None:
    read: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS.items():
            read.append(name)
            yield name, tensor

    report = DiskPublisher(tmp_path, timeout_s=2).publish(stream(), 5, ["http://127.0.0.1:9"])
    assert read == ["a", "b"]
    assert report.engines == () and "pause" in report.failures["http://127.0.0.1:9"]
