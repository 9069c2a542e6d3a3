"""The canary in a run: before its first episode and every N updates, over HTTP against an engine that answers by script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from slime_cua.config.rollout import CanaryConfig, EngineConfig, RolloutConfig
from slime_cua.config.run import RunConfig
from slime_cua.core.errors import EngineError
from slime_cua.core.types import TrainSample
from slime_cua.launch.canary import CanaryError, Images
from slime_cua.launch.console import Console
from slime_cua.launch.loop import Loop
from slime_cua.launch.run_state import Batch, RunState
from tests.unit.scripted_server import ScriptedServer

MODEL = Path("models/tiny_base")
IMAGE_TOKENS = 60
"""Of a 640x384 screenshot in models/tiny_base."""
IMAGE_ID = json.loads((MODEL / "config.json").read_text())["image_token_id"]
LOGP = -1.5


class Engine(ScriptedServer):
    """Always samples 30 and 31 with LOGP; a request counts images as models/tiny_base does."""

    def __init__(self) -> None:
        self.version, self.num_requests = 0, 0
        self.retokenises = False
        """As SGLang does with a vision request's ids: decode, tokenise the text."""
        self.says = [30, 31]
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        super().__init__()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.num_requests += 1
        ids = body["input_ids"]
        if self.retokenises and "image_data" in body:
            ids = self._tokenizer.encode(self._tokenizer.decode(ids, skip_special_tokens=False)).ids
        meta = {
            "finish_reason": {"type": "length"},
            "prompt_tokens": len(ids) + (IMAGE_TOKENS - 1) * len(body.get("image_data", [])),
            "completion_tokens": len(self.says),
            "cached_tokens": 0,
            "weight_version": str(self.version),
            "output_token_logprobs": [[LOGP, token, None] for token in self.says],
        }
        return 200, {"output_ids": self.says, "meta_info": meta}


class Trainer:
    """Log-probs that are off by `error` on samples with an image; takes every publish."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.error, self.compared, self.plans = engine, 0.0, 0, []
        self.rebuild: Any = None

    def call(self, method: str, samples: Sequence[TrainSample], images: Images) -> list[list[float]]:
        assert method == "logprobs"
        self.compared += 1
        for sample in samples:
            assert sample.segment.token_ids.count(IMAGE_ID) == len(sample.segment.images)
            assert any(sample.segment.is_trained)
            for ref in sample.segment.images:
                assert images.get(ref)
        return [
            [LOGP + (self.error if sample.segment.images else 0.0)] * sum(sample.segment.is_trained)
            for sample in samples
        ]

    def publish(self, version: int, urls: Sequence[str], plan: Any) -> Any:
        self.engine.version = version
        self.plans.append(plan)
        return SimpleNamespace(engines=tuple(urls), folder=None, seconds={"paused": 0.0})


class Fleet:
    def __init__(self, *urls: str) -> None:
        self.urls = urls

    def serving(self) -> tuple[str, ...]:
        return self.urls

    reachable = serving

    def published(self, version: int, urls: Sequence[str], folder: Path | None) -> None:
        return


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def loop_of(tmp_path: Path, engine: Engine, every: int, url: str = "") -> tuple[Loop, Trainer, list[str]]:
    """A loop over doubles, and what it asked of the rollout side."""
    canary = CanaryConfig(every=every, num_prompts=3)
    rollout = RolloutConfig(canary=canary, engine=EngineConfig(kind="embedded", request_timeout_s=2.0))
    config = RunConfig(run_dir=str(tmp_path), rollout=rollout)
    asked: list[str] = []

    def ask(method: str, *_: Any) -> dict[str, Any]:
        asked.append(method)
        return {}

    session: Any = SimpleNamespace(
        config=config,
        run=SimpleNamespace(path=tmp_path),
        model=MODEL,
        console=Console(),
        publish_plan="the plan of the config",
        rollout=ask,
        set_engines=lambda *_: None,
        on_rollout_restart=lambda *_: None,
        tasks=SimpleNamespace(train=[]),
    )
    trainer: Any = Trainer(engine)
    return Loop(session, trainer, Fleet(url or engine.url)), trainer, asked


def publish(loop: Loop, version: int) -> None:
    loop.state = RunState(version=version, batches=[Batch({}, 0)] * version)
    loop.publish()


def test_a_run_whose_engine_sees_screens_otherwise_ends_before_its_first_episode(
    tmp_path: Path, engine: Engine
) -> None:
    loop, trainer, asked = loop_of(tmp_path, engine, every=50)
    trainer.error = 0.4
    with pytest.raises(
        CanaryError, match=rf"{engine.url}, version 0,.*image: mean 0.4000.*positions, resize"
    ):
        loop.resume_or_start()
    assert engine.num_requests == 1 + 6 and asked == []


def test_an_engine_that_tokenises_again_is_refused_before_the_first_episode_with_the_flag_to_set(
    tmp_path: Path, engine: Engine
) -> None:
    loop, trainer, asked = loop_of(tmp_path, engine, every=50)
    engine.retokenises = True
    with pytest.raises(CanaryError, match=rf"{engine.url}: .*SGLANG_MM_AVOID_RETOKENIZE=1"):
        loop.resume_or_start()
    assert asked == [] and trainer.compared == 0


def test_a_sampled_placeholder_is_no_part_of_what_is_compared(tmp_path: Path, engine: Engine) -> None:
    loop, trainer, asked = loop_of(tmp_path, engine, every=50)
    engine.says = [30, IMAGE_ID]
    loop.resume_or_start()
    assert trainer.compared == 1 and asked == ["start_training", "release"]


def test_an_engine_that_samples_nothing_else_than_placeholders_is_no_pass(
    tmp_path: Path, engine: Engine
) -> None:
    loop, _, _ = loop_of(tmp_path, engine, every=50)
    engine.says = [IMAGE_ID]
    with pytest.raises(CanaryError, match="over 0 tokens"):
        loop.resume_or_start()


def test_a_run_that_agrees_starts_and_says_by_how_much(
    tmp_path: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    loop, trainer, asked = loop_of(tmp_path, engine, every=50)
    trainer.error = 0.01
    loop.resume_or_start()
    assert asked == ["start_training", "release"]
    assert (
        "engines and trainer agree at version 0: mean gap in nats text 0, image 0.01"
        in capsys.readouterr().out
    )


def test_the_check_comes_again_after_so_many_updates_and_stops_the_run_then(
    tmp_path: Path, engine: Engine
) -> None:
    loop, trainer, _ = loop_of(tmp_path, engine, every=3)
    loop.resume_or_start()
    compared = []
    for version in range(1, 7):
        publish(loop, version)
        compared.append(trainer.compared)
    assert compared == [1, 1, 2, 2, 2, 3]
    assert set(trainer.plans) == {"the plan of the config"}
    trainer.error = 1.0
    publish(loop, 8)
    with pytest.raises(CanaryError, match="version 9"):
        publish(loop, 9)


def test_an_engine_that_does_not_answer_is_no_mismatch_and_the_check_stays_due(
    tmp_path: Path, engine: Engine
) -> None:
    loop, trainer, asked = loop_of(tmp_path, engine, every=50, url="http://127.0.0.1:9")
    loop.resume_or_start()
    assert asked == ["start_training", "release"] and trainer.compared == 0
    loop._fleet.urls = (engine.url,)
    publish(loop, 1)
    assert trainer.compared == 1


def test_an_engine_with_older_weights_is_not_compared(tmp_path: Path, engine: Engine) -> None:
    loop, trainer, _ = loop_of(tmp_path, engine, every=1)
    engine.version = -1
    loop.resume_or_start()
    assert trainer.compared == 0


def test_without_the_canary_nothing_is_asked(tmp_path: Path, engine: Engine) -> None:
    loop, trainer, _ = loop_of(tmp_path, engine, every=0)
    trainer.error = 9.0
    loop.resume_or_start()
    assert engine.num_requests == 0 and issubclass(CanaryError, EngineError)
