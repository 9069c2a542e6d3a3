"""Train a policy: cold start, asynchronous RL, evaluation, export.

    python -m slime_cua.train --config recipes/NAME.yaml key=value ...

The same command continues an interrupted run: phases that are done are passed over, the rest goes on where it was.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_cua.config.base import load
from slime_cua.config.run import RunConfig

if TYPE_CHECKING:
    from slime_cua.launch.session import Session


def run(session: Session) -> None:
    """All phases of a run, in order."""
    from slime_cua.evaluation.arms import evaluate_arm, finish
    from slime_cua.launch.cold_start import cold_start

    evaluate_arm(session, "base", session.model)
    start = cold_start(session)
    if session.is_rl_unfinished():
        with session.engines(start) as fleet:
            evaluate_arm(session, "sft", start, fleet)
            reinforce(session, start, fleet)
            evaluate_arm(session, "rl", session.run.hf("rl"), fleet)
    evaluate_arm(session, "sft", start)
    if session.config.num_steps:
        evaluate_arm(session, "rl", session.run.hf("rl"))
    finish(session)


def reinforce(session: Session, start: Path, fleet: Any) -> None:
    """Asynchronous RL from the checkpoint `start`: while the trainer works, admitted groups go on."""
    from slime_cua.launch.loop import Loop

    with session.trainer(start, session.config.trainer.optimizer) as trainer:
        loop = Loop(session, trainer, fleet)
        loop.resume_or_start()
        while loop.is_unfinished():
            groups = loop.next_batch()
            loop.train(groups)
            loop.commit(groups)
            loop.publish()
            loop.release()
            loop.save_if_due()
            loop.log(groups)
        loop.finish()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="slime-cua train", description=__doc__.split("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file, e.g. recipes/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", help="key=value, dotted, e.g. trainer.parallel.tp=4")
    arguments = parser.parse_args(argv)
    config = load(RunConfig, arguments.config, arguments.overrides)
    from slime_cua.launch.children import no_child_left
    from slime_cua.launch.guardian import guarded
    from slime_cua.launch.preflight import check_arms
    from slime_cua.launch.session import Session
    from slime_cua.launch.signals import interrupt_on_signals

    check_arms(config)
    started = time.monotonic()
    with interrupt_on_signals(), no_child_left(), guarded() as guardian, Session(config, guardian) as session:
        run(session)
    print(f"done in {(time.monotonic() - started) / 60:.1f} minutes; report: {config.run_dir}/report.html")
    return 0


if __name__ == "__main__":
    import sys

    from slime_cua.cli import guarded

    raise SystemExit(guarded(main, sys.argv[1:]))
