"""The parts of an RL step, in the order in which train.py calls them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from slime_cua.core.errors import EngineError
from slime_cua.core.types import EpisodeGroup
from slime_cua.data.samples import make_train_samples, split_samples
from slime_cua.launch.session import Session
from slime_cua.launch.trainer_group import RayTrainerGroup
from slime_cua.observability.metrics import over_steps

RETRY_S = 1.0
"""Between tries to publish while engines restart."""


class Loop:
    """State of the loop in the driver: version, timers, what the step measured."""

    def __init__(self, session: Session, trainer: RayTrainerGroup, fleet: Any) -> None:
        self._session, self._trainer, self._fleet = session, trainer, fleet
        self._config = session.config
        self._run = session.run
        self.version = 0
        self._started = time.monotonic()
        self._step_started = self._started
        self._spent_before_s = 0.0
        self._values: dict[str, float] = {}
        self._saved = -1
        self._unmarked: dict[str, Any] | None = None

    def resume_or_start(self) -> None:
        """Weights, optimiser, sampler and groups of the latest checkpoint; or the beginning."""
        state = None
        checkpoint = self._run.latest_checkpoint()
        if checkpoint is not None:
            run_state = json.loads((checkpoint / "run_state.json").read_text())
            self.version, state = run_state["version"], run_state["rollout"]
            self._spent_before_s = run_state["spent_s"]
            self._trainer.call("restore", str(checkpoint / "trainer"))
            self._saved = self.version
            self._session.console.say(f"continuing at step {self.version}")
            self.publish()
        self._session.rollout("start_training", self._session.step_tasks(), state)

    def is_unfinished(self) -> bool:
        """False after num_steps, or once the RL phase has taken config.minutes."""
        spent_s = self._spent_before_s + time.monotonic() - self._started
        is_late = self._config.minutes > 0 and spent_s > 60 * self._config.minutes
        return self.version < self._config.num_steps and not is_late

    def next_batch(self) -> list[EpisodeGroup]:
        """Wait for the groups of this step."""
        self._step_started = time.monotonic()
        waiting = f"step {self.version + 1}: waiting for episodes"
        self._session.console.progress(waiting)
        groups, self._values = self._session.play("next_batch", what=waiting, meanwhile=self._bring_weights)
        return list(groups)

    def train(self, groups: list[EpisodeGroup]) -> None:
        """trainer.steps_per_collection optimiser steps, each over its share of the segments of `groups`."""
        self._session.console.progress(f"step {self.version + 1}: training")
        rollout = self._config.rollout
        is_masked = rollout.scheduler.stale == "mask"
        samples = make_train_samples(
            groups,
            self._config.advantage,
            seed=self._config.seed + self.version,
            oldest_version=self.version - rollout.max_policy_lag if is_masked else 0,
        )
        shares = split_samples(
            samples, self._config.trainer.steps_per_collection, seed=self._config.seed + self.version
        )
        metrics = [
            self._trainer.call(
                "train_step",
                share,
                self._session.images,
                loss=self._config.loss.name,
                section=self._config.loss,
                policy_version=self.version,
                max_policy_lag=rollout.max_policy_lag,
                temperature=rollout.sampling.temperature,
            )
            for share in shares
        ]
        self._values |= over_steps(metrics)
        self.version += 1

    def publish(self) -> None:
        """The new weights to the engines; those that miss them are out of traffic until the fleet mended them.

        Raises EngineError when no engine takes them within engine.start_timeout_s: as long as a restart may take.
        """
        engine = self._config.rollout.engine
        deadline = time.monotonic() + engine.start_timeout_s
        while True:
            try:
                report = self._trainer.publish(
                    self.version, self._fleet.reachable(), use_gpu=self._session.use_gpu, engine_tp=engine.tp
                )
                break
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise
                self._session.console.progress(f"waiting for an engine that takes weights: {error}")
                time.sleep(RETRY_S)
        self._fleet.published(self.version, report.engines, report.folder)
        self._session.rollout("set_engines", self._fleet.serving(), self.version)
        self._values["time/publish_s"] = report.seconds["paused"]

    def _bring_weights(self) -> None:
        """When every engine was restarted since the last publish, the episodes that we wait for need weights first."""
        if self._fleet.reachable() and not self._fleet.serving():
            self._session.console.say(f"an engine was restarted: sending version {self.version} again")
            self.publish()

    def release(self, groups: list[EpisodeGroup]) -> None:
        """The groups are trained and the new weights are out: more may be admitted."""
        self._session.rollout("trained", [group.group_id for group in groups])

    def save_if_due(self) -> None:
        """Write a checkpoint every save_every steps. It counts once `log` has run: no step is without its row."""
        if self.version % self._config.save_every == 0:
            self._save()

    def log(self) -> None:
        """The step's row of metrics, then the mark that its checkpoint is complete."""
        seconds = time.monotonic() - self._step_started
        self._values |= {"time/step_s": seconds, "busy/trainer": self._values["time/train_s"] / seconds}
        self._session.logger.log(self._values, step=self.version)
        self._mark()
        values = self._values
        self._session.console.say(
            f"step {self.version}: reward {values['reward/mean']:.2f}, code {values['rollout/code_action_rate']:.2f}, "
            f"format errors {values['rollout/format_error_rate']:.2f}, clipped {values.get('loss/clip_fraction', 0):.2f}, "
            f"lag {values.get('lag/max', 0):.0f}, {seconds:.1f} s (waited {values['time/wait_s']:.1f}, "
            f"trained {values['time/train_s']:.1f}, published {values['time/publish_s']:.2f})"
        )

    def finish(self) -> None:
        """Export the policy; the phase is done."""
        if self._saved != self.version:
            self._save()
            self._mark()
        self._session.rollout("stop_training")
        target: Path = self._run.hf("rl")
        self._trainer.call("export_hf", str(target))
        self._fleet.published(self.version, self._fleet.serving(), target)
        seconds = self._spent_before_s + time.monotonic() - self._started
        self._run.finish_phase("rl", {"seconds": seconds, "num_steps": float(self.version)})

    def _save(self) -> None:
        self._session.console.progress(f"step {self.version}: saving")
        started = time.monotonic()
        folder = self._run.checkpoint(self.version)
        state = self._session.rollout("state")
        self._trainer.call("save", str(folder / "trainer"), self.version)
        spent_s = self._spent_before_s + time.monotonic() - self._started
        self._unmarked = {"version": self.version, "rollout": state, "spent_s": spent_s}
        self._values["time/save_s"] = time.monotonic() - started

    def _mark(self) -> None:
        if self._unmarked is not None:
            self._run.publish_checkpoint(self.version, self._unmarked)
            self._saved, self._unmarked = self.version, None
