"""The cold start: scripted demonstrations in live desktops, filtered by score, trained by the same trainer as RL.

Interrupted while it trains, it goes on from its last checkpoint (sft.save_every), its batches in the same order.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime_cua.core.errors import DamagedCheckpointError, DataError
from slime_cua.core.types import Episode, TrainSample
from slime_cua.data.episodes import EpisodeStore
from slime_cua.data.segments import build_segments
from slime_cua.launch.run_state import SftState
from slime_cua.launch.session import Session, evenly
from slime_cua.launch.steady_trainer import Call, SteadyTrainer
from slime_cua.trainer.folders import step_folder

DEMONSTRATIONS = "demonstrations"


def cold_start(session: Session) -> Path:
    """The checkpoint that RL starts from: the model itself when sft.num_episodes is 0."""
    config = session.config.sft
    if config.num_episodes == 0:
        return session.model
    target = session.run.hf("sft")
    if session.run.phase_result("sft") is not None:
        session.run.remove_sft_checkpoints()
        return target
    episodes = _demonstrations(session)
    samples = demonstration_samples(episodes, config.min_rule_score)
    session.console.say(f"{len(samples)} segments of {len(episodes)} demonstrations pass the filter")
    with session.trainer(session.model, config.optimizer) as trainer:
        result = _SftLoop(session, trainer, samples).run()
    session.run.finish_phase("sft", result)
    session.run.remove_sft_checkpoints()
    return target


def _demonstrations(session: Session) -> list[Episode]:
    """Collected, or, once training on them has begun, those that it began on: its batches must not change."""
    if SftState.load(session.run.path) is not None:
        groups = EpisodeStore(session.run.episodes(DEMONSTRATIONS)).read()
        last = {group.group_id: group.episodes[-1] for group in groups}
        return [last[key] for key in sorted(last)]
    num_episodes = session.config.sft.num_episodes
    session.console.say(f"collecting {num_episodes} demonstrations")
    tasks = evenly(session.tasks.demonstrations)
    episodes: list[Episode] = session.play(
        "demonstrate", DEMONSTRATIONS, tasks, num_episodes, what="demonstrations"
    )
    return episodes


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


class _SftLoop:
    """The cold start's steps. A step's batch follows from its number, so what no checkpoint holds can be trained again."""

    def __init__(self, session: Session, trainer: SteadyTrainer, samples: list[TrainSample]) -> None:
        self._session, self._trainer, self._samples = session, trainer, samples
        self._config, self._run = session.config.sft, session.run
        self._folder = session.run.checkpoints / "sft"
        self._state = SftState.load(session.run.path) or SftState()
        self._state.save(session.run.path)
        self.step = self._state.step
        self._metrics: dict[str, float] = {}
        self._since = time.monotonic()

    def run(self) -> dict[str, float]:
        """All steps that are left; what the phase leaves."""
        config, console = self._config, self._session.console
        self._trainer.rebuild = self._rebuild
        if self.step:
            console.say(f"cold start: continuing at step {self.step}")
            self._trainer.come_back()
        self._since = time.monotonic()
        total = -(-config.num_epochs * len(self._samples) // config.batch_size)
        batches = self._batches_from(self.step)
        while self._is_unfinished(total):
            self._metrics = self._train(self._trainer.call, next(batches))
            values = {key: value for key, value in self._metrics.items() if key.startswith("sft/")}
            self._session.logger.log(values, step=self.step, axis="sft_step")
            self.step += 1
            console.progress(f"cold start: step {self.step} of {total}, loss {self._metrics['sft/loss']:.3f}")
            if self.step % config.save_every == 0:
                self._save()
        self._trainer.call("export_hf", str(self._run.hf("sft")))
        console.say(
            f"cold start: {self.step} steps in {self._spent_s():.0f} s, loss {self._metrics.get('sft/loss', float('nan')):.3f}"
        )
        return {
            "seconds": self._spent_s(),
            "num_steps": float(self.step),
            "num_segments": float(len(self._samples)),
        }

    def _is_unfinished(self, total: int) -> bool:
        minutes = self._config.minutes
        return self._spent_s() <= 60 * minutes if minutes else self.step < total

    def _save(self) -> None:
        """The checkpoint first, then the state that names it, then older ones go."""
        self._trainer.call("save", str(self._folder), self.step)
        self._state = SftState(self.step, self._spent_s())
        self._since = time.monotonic()
        self._state.save(self._run.path)
        self._run.remove_checkpoints(but=[self.step], folder=self._folder)

    def _rebuild(self, call: Call) -> None:
        """A trainer that has only loaded its start comes to where this loop is."""
        step = self._state.step
        if step:
            try:
                call("restore", str(step_folder(self._folder, step)))
            except DamagedCheckpointError as error:
                self._session.console.say(f"cold start: from the beginning: {error}")
                step = 0
        for batch in itertools.islice(self._batches_from(step), self.step - step):
            self._train(call, batch)

    def _train(self, call: Call, batch: list[TrainSample]) -> dict[str, float]:
        metrics: dict[str, float] = call("train_step", batch, self._session.images, loss="sft")
        return metrics

    def _batches_from(self, step: int) -> Iterator[list[TrainSample]]:
        return itertools.islice(
            _batches(self._samples, self._config.batch_size, self._session.config.seed), step, None
        )

    def _spent_s(self) -> float:
        return self._state.spent_s + time.monotonic() - self._since


def _batches(samples: list[TrainSample], size: int, seed: int) -> Iterator[list[TrainSample]]:
    """Batches of `size` over endless passes, each in an order of its own."""
    rng = random.Random(f"sft {seed}")
    queue: list[TrainSample] = []
    while True:
        while len(queue) < size:
            queue += rng.sample(samples, len(samples))
        yield queue[:size]
        queue = queue[size:]
