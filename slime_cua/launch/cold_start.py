"""The cold start: scripted demonstrations in live desktops, filtered by score, trained by the same trainer as RL."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime_cua.core.errors import DataError
from slime_cua.core.types import Episode, TrainSample
from slime_cua.data.segments import build_segments
from slime_cua.launch.session import Session, evenly

DEMONSTRATIONS = "demonstrations"


def cold_start(session: Session) -> Path:
    """The checkpoint that RL starts from: the model itself when sft.num_episodes is 0."""
    config = session.config.sft
    if config.num_episodes == 0:
        return session.model
    target = session.run.hf("sft")
    if session.run.phase_result("sft") is not None:
        return target
    tasks = evenly(session.step_tasks())
    session.console.say(f"collecting {config.num_episodes} demonstrations")
    episodes: list[Episode] = session.play(
        "demonstrate", DEMONSTRATIONS, tasks, config.num_episodes, what="demonstrations"
    )
    samples = demonstration_samples(episodes, config.min_rule_score)
    session.console.say(f"{len(samples)} segments of {len(episodes)} demonstrations pass the filter")
    result = _train(session, samples, target)
    session.run.finish_phase("sft", result)
    return target


def demonstration_samples(episodes: Sequence[Episode], min_score: float) -> list[TrainSample]:
    """Segments of the episodes that the judge scored at least `min_score`. Raises DataError when none is left."""
    kept = [e for e in episodes if e.is_valid and e.reward is not None and e.reward >= min_score]
    samples = [TrainSample(segment=s, reward=e.reward) for e in kept for s in build_segments(e)]
    if not samples:
        reasons = sorted({e.error or f"score {e.reward}" for e in episodes})[:5]
        raise DataError(
            f"none of {len(episodes)} demonstrations scored {min_score} or more (sft.min_rule_score): {'; '.join(reasons)}"
        )
    return samples


def _train(session: Session, samples: list[TrainSample], target: Path) -> dict[str, float]:
    config = session.config.sft
    with session.trainer(session.model, config.optimizer) as trainer:
        started, step = time.monotonic(), 0
        metrics: dict[str, float] = {}
        for step, batch in enumerate(_batches(samples, config.batch_size, session.config.seed)):
            spent_s = time.monotonic() - started
            if config.minutes and spent_s > 60 * config.minutes:
                break
            if not config.minutes and step * config.batch_size >= config.num_epochs * len(samples):
                break
            metrics = trainer.call("train_step", batch, session.images, loss="sft")
            session.logger.log(
                {k: v for k, v in metrics.items() if k.startswith("sft/")}, step=step, axis="sft_step"
            )
            total = -(-config.num_epochs * len(samples) // config.batch_size)
            session.console.progress(
                f"cold start: step {step + 1} of {total}, loss {metrics['sft/loss']:.3f}"
            )
        trainer.call("export_hf", str(target))
        seconds = time.monotonic() - started
    session.console.say(
        f"cold start: {step} steps in {seconds:.0f} s, loss {metrics.get('sft/loss', float('nan')):.3f}"
    )
    return {"seconds": seconds, "num_steps": float(step), "num_segments": float(len(samples))}


def _batches(samples: list[TrainSample], size: int, seed: int) -> Iterator[list[TrainSample]]:
    """Batches of `size` over endless passes, each in an order of its own."""
    rng = random.Random(f"sft {seed}")
    queue: list[TrainSample] = []
    while True:
        while len(queue) < size:
            queue += rng.sample(samples, len(samples))
        yield queue[:size]
        queue = queue[size:]
