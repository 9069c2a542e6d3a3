"""The parts of an RL step, in the order in which train.py calls them, and how a run comes back to where it was."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_cua.core.errors import DamagedCheckpointError, EngineError
from slime_cua.core.types import EpisodeGroup
from slime_cua.data.episodes import EpisodeStore
from slime_cua.data.samples import make_train_samples, split_samples
from slime_cua.launch.ahead_hint import AheadHint
from slime_cua.launch.canary import Canary, CanaryError
from slime_cua.launch.run_state import Batch, RunState
from slime_cua.launch.steady_trainer import Call, SteadyTrainer
from slime_cua.observability.logger import last_step
from slime_cua.observability.metrics import over_steps

if TYPE_CHECKING:
    from slime_cua.launch.session import Session

RETRY_S = 1.0
"""Between tries to publish while engines restart."""
NUM_CHECKPOINTS = 2
"""Kept: the last, and the one before for the case that it is damaged."""


class Loop:
    """The loop in the driver. `state` is what RUN/state.json holds; everything else here may be lost.

    A step counts when `commit` has written the state. Its weights go out and its admissions start only then, so no token
    is ever of a version that a crash takes away. What no checkpoint holds yet is trained again from its recorded episodes.
    """

    def __init__(self, session: Session, trainer: SteadyTrainer, fleet: Any) -> None:
        self._session, self._trainer, self._fleet = session, trainer, fleet
        self._config = session.config
        self._run = session.run
        self.state = RunState()
        self._writing: int | None = None
        """Version whose checkpoint is being written; no state names it yet."""
        self._damaged: set[int] = set()
        """Checkpoints found damaged since the start."""
        self._since = self._step_started = time.monotonic()
        self._values: dict[str, float] = {}
        rollout = session.config.rollout
        self._ahead_hint = AheadHint(rollout, len(session.tasks.train))
        self._canary = Canary(rollout.canary, session.model, timeout_s=rollout.engine.request_timeout_s)

    @property
    def version(self) -> int:
        """Steps that count, each over one collection of groups."""
        return self.state.version

    def resume_or_start(self) -> None:
        """Weights, optimiser, sampler and groups of the run state; or the beginning."""
        self._trainer.rebuild = self._rebuild
        state = RunState.load(self._run.path)
        if state is not None:
            self.state = state
            self._session.console.say(f"continuing at step {self.version}")
            self._run.remove_checkpoints(but=state.checkpoints)
            self._trainer.come_back()
            self._log_missing_row()
        if self.version:
            self.publish()
        self._check_engines()
        self._session.on_rollout_restart(self._start_rollout)
        self._start_rollout()

    def is_unfinished(self) -> bool:
        """False after num_steps, or once the RL phase has taken config.minutes."""
        is_late = self._config.minutes > 0 and self._spent_s() > 60 * self._config.minutes
        return self.version < self._config.num_steps and not is_late

    def next_batch(self) -> list[EpisodeGroup]:
        """Wait for the groups of this step."""
        self._step_started = time.monotonic()
        waiting = f"step {self.version + 1}: waiting for episodes"
        self._session.console.progress(waiting)
        groups, self._values = self._session.play("next_batch", what=waiting, meanwhile=self._bring_weights)
        return list(groups)

    def train(self, groups: list[EpisodeGroup]) -> None:
        """Train on all segments of `groups`. It is lost with the process until `commit`."""
        self._session.console.progress(f"step {self.version + 1}: training")
        self._values |= self._trainer.together(
            "train_step", lambda call: self._train(call, groups, self.version)
        )

    def commit(self, groups: list[EpisodeGroup]) -> None:
        """Count the step: the run state with it is on disk afterwards."""
        rollout = self._session.rollout("commit", [group.group_id for group in groups])
        batch = Batch(rollout.pop("trained"), rollout["num_stored"])
        seconds = time.monotonic() - self._step_started
        self._values |= {"time/step_s": seconds, "busy/trainer": self._values["time/train_s"] / seconds}
        self._write(
            version=self.version + 1,
            rollout=rollout,
            batches=[*self.state.batches, batch],
            row={name: float(value) for name, value in self._values.items()},
        )

    def publish(self) -> None:
        """The new weights to the engines; those that miss them are out of traffic until the fleet mended them.

        Raises EngineError when no engine takes them within engine.start_timeout_s: as long as a restart may take.
        """
        engine = self._config.rollout.engine
        deadline = time.monotonic() + engine.start_timeout_s
        while True:
            try:
                report = self._trainer.publish(
                    self.version, self._fleet.reachable(), self._session.publish_plan
                )
                break
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise
                self._session.console.progress(f"waiting for an engine that takes weights: {error}")
                time.sleep(RETRY_S)
        self._fleet.published(self.version, report.engines, report.folder)
        self._session.set_engines(self._fleet.serving(), self.version)
        self._values["time/publish_s"] = report.seconds["paused"]
        self._check_engines()

    def _check_engines(self) -> None:
        """Where the canary is due: engines and trainer compute the same policy, or CanaryError ends the run."""
        urls = self._fleet.serving()
        if not urls or not self._canary.is_due(self.version):
            return
        self._session.console.progress("comparing engines with the trainer")
        try:
            gaps = self._canary.check(
                urls, self.version, lambda samples, images: self._trainer.call("logprobs", samples, images)
            )
        except CanaryError:
            raise
        except EngineError as error:
            self._session.console.say(f"engines were not compared with the trainer, later again: {error}")
            return
        self._values |= {f"canary/gap/{kind}": gap.mean for kind, gap in gaps.items()}
        found = ", ".join(f"{kind} {gap.mean:.2g}" for kind, gap in gaps.items())
        self._session.console.say(
            f"engines and trainer agree at version {self.version}: mean gap in nats {found}"
        )

    def _bring_weights(self) -> None:
        """When every engine was restarted since the last publish, the episodes that we wait for need weights first."""
        if self._fleet.reachable() and not self._fleet.serving():
            self._session.console.say(f"an engine was restarted: sending version {self.version} again")
            self.publish()

    def release(self) -> None:
        """The new weights are out: the groups that `commit` admitted start."""
        self._session.rollout("release")

    def save_if_due(self) -> None:
        """Begin a checkpoint every save_every steps, once the one before is on disk and in the state."""
        is_due = self.version % self._config.save_every == 0
        if not is_due and self._writing is None:
            return
        started = time.monotonic()
        self._settle()
        if is_due and self.version not in self._good_checkpoints():
            self._save(is_async=self._config.trainer.async_save)
        self._values["time/save_s"] = time.monotonic() - started

    def log(self, groups: Sequence[EpisodeGroup]) -> None:
        """The step's row of metrics."""
        seconds = time.monotonic() - self._step_started
        self._values |= {"time/step_s": seconds, "busy/trainer": self._values["time/train_s"] / seconds}
        self._session.logger.log(self._values, step=self.version)
        values = self._values
        self._session.console.say(
            f"step {self.version}: reward {values['reward/mean']:.2f}, code {values['rollout/code_action_rate']:.2f}, "
            f"format errors {values['rollout/format_error_rate']:.2f}, clipped {values.get('loss/clip_fraction', 0):.2f}, "
            f"lag {values.get('lag/max', 0):.0f}, {seconds:.1f} s (waited {values['time/wait_s']:.1f}, "
            f"trained {values['time/train_s']:.1f}, published {values['time/publish_s']:.2f})"
        )
        if hint := self._ahead_hint.note(groups, values):
            self._session.console.say(hint)

    def finish(self) -> None:
        """Export the policy; the phase is done."""
        self._session.on_rollout_restart(None)
        self._settle()
        if self.version not in self._good_checkpoints():
            self._save(is_async=False)
        self._session.rollout("stop_training")
        target: Path = self._run.hf("rl")
        self._trainer.call("export_hf", str(target))
        self._fleet.published(self.version, self._fleet.serving(), target)
        self._run.finish_phase("rl", {"seconds": self._spent_s(), "num_steps": float(self.version)})

    def _start_rollout(self) -> None:
        """Admission begins or goes on: what it admits is in the state before any of it starts."""
        tasks = self._session.tasks.train
        self._write(rollout=self._session.rollout("start_training", tasks, self.state.rollout))
        self._session.rollout("release")

    def _rebuild(self, call: Call) -> None:
        """A trainer that has only loaded its start comes to the state's version."""
        step = self._restore(call)
        if step < self.version:
            self._session.console.say(
                f"training steps {step + 1} to {self.version} again, from their episodes"
            )
        store = EpisodeStore(self._run.episodes("rl"))
        for version in range(step, self.version):
            batch = self.state.batches[version].groups
            self._train(call, [store.read_at(place, name) for name, place in batch.items()], version)

    def _restore(self, call: Call) -> int:
        """The step of the newest checkpoint that is whole and undamaged, which was read; 0: none, and nothing was."""
        for step in reversed(self.state.checkpoints):
            if not self._run.is_whole(step):
                continue
            try:
                call("restore", str(self._run.checkpoint(step)))
                return step
            except DamagedCheckpointError as error:
                self._damaged.add(step)
                self._session.console.say(f"step {step} is passed over: {error}")
        return 0

    def _train(self, call: Call, groups: Sequence[EpisodeGroup], version: int) -> dict[str, float]:
        """The step from `version` over `groups`, in trainer.steps_per_collection optimiser steps.

        Depends on nothing else, so that it can be repeated.
        """
        rollout = self._config.rollout
        is_masked = rollout.scheduler.stale == "mask"
        samples = make_train_samples(
            groups,
            self._config.advantage,
            seed=self._config.seed + version,
            oldest_version=version - rollout.max_policy_lag if is_masked else 0,
        )
        shares = split_samples(
            samples, self._config.trainer.steps_per_collection, seed=self._config.seed + version
        )
        return over_steps(
            [
                call(
                    "train_step",
                    share,
                    self._session.images,
                    loss=self._config.loss.name,
                    section=self._config.loss,
                    policy_version=version,
                    max_policy_lag=rollout.max_policy_lag,
                    temperature=rollout.sampling.temperature,
                )
                for share in shares
            ]
        )

    def _save(self, is_async: bool) -> None:
        """Write a checkpoint of this version and name it in the state; is_async: begin to, `_settle` names it."""
        self._session.console.progress(f"step {self.version}: saving")
        self._trainer.call("save", str(self._run.checkpoints), self.version, is_async=is_async)
        if is_async:
            self._writing = self.version
        else:
            self._name_checkpoint(self.version)

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written. What was lost with the ranks that wrote it is written anew, of now."""
        if self._writing is None:
            return
        is_whole = self._trainer.call("finish_save") is not None
        version, self._writing = self._writing, None
        if is_whole:
            self._name_checkpoint(version)
        else:
            self._save(is_async=False)

    def _name_checkpoint(self, version: int) -> None:
        """It is whole: the state names it, then older ones go."""
        kept = [*(step for step in self._good_checkpoints() if step != version), version][-NUM_CHECKPOINTS:]
        self._damaged.discard(version)
        self._write(checkpoints=kept)
        self._run.remove_checkpoints(but=kept)

    def _good_checkpoints(self) -> list[int]:
        return [step for step in self.state.checkpoints if step not in self._damaged]

    def _write(self, **changes: Any) -> None:
        """Replace the run state on disk; only then here."""
        state = RunState(**{**vars(self.state), **changes, "spent_s": self._spent_s()})
        state.save(self._run.path)
        self.state, self._since = state, time.monotonic()

    def _spent_s(self) -> float:
        return self.state.spent_s + time.monotonic() - self._since

    def _log_missing_row(self) -> None:
        """A run that died between `commit` and `log` has its step's row in the state only."""
        if self.state.row and last_step(self._run.path) < self.version:
            self._session.logger.log(self.state.row, step=self.version)
