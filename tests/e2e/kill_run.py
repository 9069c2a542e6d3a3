"""Kills runs at seeded moments until they are done, and compares each with an uninterrupted one over the same episodes.

    python -m tests.e2e.kill_run FOLDER [--moments 100] [--seed 0]
    python -m tests.e2e.kill_run FOLDER --damaged      one run whose newest checkpoint has a flipped byte when it goes on

One interpreter that has everything imported forks the runs. Prints one JSON line: how many moments of each kind, how many groups
were masked and dropped for their age, or what a damaged run's console said.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.scheduler import Scheduler
from rollout.worker import _duration_s
from slime_cua.algo.frontier import make_sampler
from slime_cua.config.run import RunConfig
from slime_cua.core.startup import heavy_imports
from slime_cua.core.types import EpisodeGroup
from slime_cua.data.episodes import EpisodeStore
from slime_cua.data.images import ImageStore
from slime_cua.data.samples import make_train_samples, split_samples
from slime_cua.launch.run_state import RunState
from slime_cua.observability.logger import read_rows
from slime_cua.train import reinforce
from slime_cua.trainer.folders import is_whole, step_folder
from slime_cua.trainer.rank import TrainerRank
from tests.e2e.kill_parts import TASKS, Fleet, OneProcessSession, config_of, die_at, facts, held_groups
from tests.numerics.tiny_models import make_qwen35

MODES = ("operation", "signal", "parts")
MAX_OPERATION = 70
"""A step has about 30 durable operations."""


def run_to_its_end(folder: Path, config: RunConfig, model: Path, mode: str, seed: int) -> None:
    """What one start of the command does; `mode` says how it may die."""
    losses = random.Random(seed) if mode == "parts" else None
    if mode == "operation":
        rng = random.Random(seed)
        die_at(rng.randint(1, MAX_OPERATION), rng)
    with OneProcessSession(config, model, losses, counter=folder / "losses") as session:
        reinforce(session, model, Fleet(session.run.path, folder / "history.jsonl"))


def forked(folder: Path, work: Callable[[], None]) -> int:
    """`work` in a child; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        (folder / "error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def ended(pid: int, folder: Path) -> str:
    """How a child ended: done or killed; anything else is an error of the run."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code in (9, -signal.SIGKILL):
        return "killed"
    if code:
        raise SystemExit(f"{folder}: a run failed:\n{(folder / 'error').read_text()}")
    return "done"


def kill_until_done(folder: Path, config: RunConfig, model: Path, rng: random.Random) -> Counter[str]:
    """Start the same command again and again; how often it was killed, by kind."""
    moments: Counter[str] = Counter()
    while True:
        mode = rng.choices(MODES, (7, 2, 1))[0]
        seed, wait_s = rng.randrange(1 << 30), rng.uniform(0.2, 2.5)
        pid = forked(folder, lambda mode=mode, seed=seed: run_to_its_end(folder, config, model, mode, seed))
        if mode == "signal":
            time.sleep(wait_s)
            os.kill(pid, signal.SIGKILL)
        if ended(pid, folder) == "killed":
            moments[mode] += 1
            check_named(folder)
        else:
            moments["parts"] += (folder / "losses").stat().st_size if (folder / "losses").exists() else 0
            return moments


def check_named(folder: Path) -> None:
    """Whatever moment it was: the state names whole checkpoints only."""
    state = RunState.load(folder / "run")
    for step in state.checkpoints if state else ():
        assert is_whole(step_folder(folder / "run/checkpoints", step)), f"step {step} is named and not whole"


def go_on_from_damage(folder: Path, model: Path) -> str:
    """A finished run loses a bit of its newest checkpoint and goes on for two steps; what its console said."""
    config = config_of(folder)
    ended(forked(folder, lambda: run_to_its_end(folder, config, model, "whole", 0)), folder)
    data = next(step_folder(folder / "run/checkpoints", config.num_steps).glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    longer = config.model_copy(update={"num_steps": config.num_steps + 2})
    ended(forked(folder, lambda: run_to_its_end(folder, longer, model, "whole", 0)), folder)
    ended(forked(folder, lambda: check(folder, longer, model)), folder)
    check_named(folder)
    return (folder / "run/logs/driver.log").read_text()


def check(folder: Path, config: RunConfig, model: Path) -> None:
    """The run in `folder` against an uninterrupted one."""
    state = RunState.load(folder / "run")
    assert state is not None and state.rollout is not None and state.version == config.num_steps
    groups = EpisodeStore(folder / "run/episodes/rl.jsonl").read()
    check_books(state, groups, config, ImageStore(folder / "run/images"))
    check_sampler(state, groups, config, held_groups(folder / "history.jsonl"))
    steps = [row["step"] for row in read_rows(folder / "run/metrics.jsonl")]
    assert steps == list(range(1, config.num_steps + 1)), f"rows of steps {steps}"
    check_weights(folder, state, {group.group_id: group for group in groups}, config, model)


def check_books(state: RunState, groups: list[EpisodeGroup], config: RunConfig, images: ImageStore) -> None:
    """Each group stored once and trained once; nothing lost; no token older than allowed; every screenshot there."""
    stored = [group.group_id for group in groups]
    assert len(set(stored)) == len(stored), "a group is stored twice"
    trained = [name for batch in state.batches for name in batch.groups]
    assert len(set(trained)) == len(trained) == config.num_steps * config.rollout.groups_per_step
    assert set(trained) <= set(stored)
    assert state.rollout is not None
    waiting = set(state.rollout["finished"])
    scheduler, stale = state.rollout["scheduler"], config.rollout.scheduler.stale
    admitted = {f"g{number:06d}" for number in range(scheduler["num_admitted"])}
    cancelled = admitted - set(stored) - {group["group_id"] for group in scheduler["groups"]}
    assert len(cancelled) <= scheduler["num_stale"], f"lost: {sorted(cancelled)}"
    assert scheduler["num_stale"] == 0 or stale == "drop"
    assert scheduler["num_masked"] == 0 or stale == "mask"
    assert not waiting & set(trained)
    num_ended = len(trained) + len(waiting) + scheduler["num_dropped"]
    assert state.rollout["num_stored"] == num_ended - len(cancelled)
    by_id = {group.group_id: group for group in groups}
    for version, batch in enumerate(state.batches):
        for name in batch.groups:
            turns = [turn for episode in by_id[name].episodes for turn in episode.turns]
            versions = [v for turn in turns for v in turn.response_versions]
            assert stale == "mask" or version - config.rollout.max_policy_lag <= min(versions)
            assert max(versions) <= version
            for ref in (ref for turn in turns for ref in turn.context_images):
                images.get(ref)


def check_sampler(
    state: RunState, groups: list[EpisodeGroup], config: RunConfig, held: dict[int, set[str]]
) -> None:
    """Sampler and scheduler of an uninterrupted run that was given the same groups in the same order. held: after each step;
    running groups that are not in it were too old."""
    assert state.rollout is not None
    sampler = make_sampler([task.id for task in TASKS], config.sampler, seed=config.seed)
    scheduler = Scheduler(
        config.rollout.groups_per_step, config.rollout.max_policy_lag, options=config.rollout.scheduler
    )

    def admit() -> None:
        while (wanted := scheduler.num_to_draw()) > 0:
            scheduler.enqueue(sampler.sample(min(wanted, len(TASKS))))
        for task_id in scheduler.dequeue():
            scheduler.admit(f"g{scheduler.num_admitted:06d}", task_id)

    def settle(group: EpisodeGroup) -> None:
        scores = [episode.reward if episode.is_valid else None for episode in group.episodes]
        valid = [score for score in scores if score is not None]
        sampler.update({group.task_id: scores})
        if len(valid) < 2:
            scheduler.drop(group.group_id)
            return admit()
        versions = [v for e in group.episodes for t in e.turns for v in t.response_versions]
        scheduler.groups[group.group_id].oldest_version = min(versions)
        scheduler.record_duration(group.task_id, _duration_s(group))
        if not scheduler.finish(group.group_id, is_flat=len(set(valid)) < 2):
            admit()

    admit()
    place = 0
    for batch in state.batches:
        for group in groups[place : batch.num_stored]:
            settle(group)
        place = batch.num_stored
        for group_id in scheduler.groups.keys() - held[scheduler.version + 1] - batch.groups.keys():
            if not scheduler.groups[group_id].is_finished:
                scheduler.record_version(group_id, scheduler.oldest_trainable)
        for dropped in scheduler.trained(list(batch.groups)):
            assert not dropped.is_protected
            if not dropped.is_finished:
                sampler.release(dropped.task_id)
        assert scheduler.groups.keys() <= held[scheduler.version]
        admit()
        assert scheduler.groups.keys() == held[scheduler.version]
    for group in groups[place : state.rollout["num_stored"]]:
        settle(group)
    assert json.loads(json.dumps(sampler.state_dict())) == state.rollout["sampler"]
    mine, theirs = books(scheduler.state_dict()), books(state.rollout["scheduler"])
    assert mine == theirs, {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


def aged(folder: Path) -> Counter[str]:
    """How many groups a run masked, and how many it dropped, for their age."""
    state = RunState.load(folder / "run")
    assert state is not None and state.rollout is not None
    return Counter({name: state.rollout["scheduler"][f"num_{name}"] for name in ("masked", "stale")})


def books(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without what running groups have sampled, which no store knows."""
    groups = [
        group if group["is_finished"] else {**group, "oldest_version": None} for group in state["groups"]
    ]
    return json.loads(json.dumps({**state, "groups": groups}))


def check_weights(
    folder: Path, state: RunState, groups: dict[str, EpisodeGroup], config: RunConfig, model: Path
) -> None:
    """Weights and optimiser bit for bit."""
    rank = TrainerRank(config.trainer)
    rank.load(model)
    rank.restore(step_folder(folder / "run/checkpoints", state.version))
    found = facts(rank)
    rank.close()
    rank = TrainerRank(config.trainer)
    rank.load(model)
    before = facts(rank)
    for version, batch in enumerate(state.batches):
        oldest = version - config.rollout.max_policy_lag if config.rollout.scheduler.stale == "mask" else 0
        samples = make_train_samples(
            [groups[name] for name in batch.groups], config.advantage, seed=version, oldest_version=oldest
        )
        for share in split_samples(samples, config.trainer.steps_per_collection, seed=version):
            rank.train_step(
                share,
                ImageStore(folder / "run/images"),
                loss=config.loss.name,
                section=config.loss,
                policy_version=version,
                max_policy_lag=1,
                temperature=config.rollout.sampling.temperature,
            )
    rank.optimizer.allocate_state()
    wanted = facts(rank)
    rank.close()
    assert before["steps"] == 0 and wanted["steps"] > 0
    differing = [name for name in wanted if wanted[name] != found.get(name)]
    assert not differing and wanted.keys() == found.keys(), f"differ: {differing[:5]} of {len(wanted)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first run: config_of says what it means"
    )
    parser.add_argument("--damaged", action="store_true")
    options = parser.parse_args()
    model = make_qwen35(options.folder / "model", layer_types=("full_attention",))
    with heavy_imports():  # nor does the collector of a forked run copy what it does not use
        warm = TrainerRank(config_of(options.folder).trainer)
        warm.load(model)
        warm.close()
    if options.damaged:
        print(json.dumps({"console": go_on_from_damage(options.folder, model)}))
        return
    rng = random.Random(options.seed)
    moments: Counter[str] = Counter()
    too_old: Counter[str] = Counter()
    num_runs, began = 0, time.monotonic()
    while sum(moments.values()) < options.moments:
        folder = options.folder / f"run_{num_runs}"
        folder.mkdir()
        config = config_of(folder, options.first + num_runs)
        moments += kill_until_done(folder, config, model, rng)
        ended(forked(folder, lambda folder=folder, config=config: check(folder, config, model)), folder)
        too_old += aged(folder)
        shutil.rmtree(folder)
        num_runs += 1
        print(f"run {num_runs}: {dict(moments)}", file=sys.stderr, flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    times = {"seconds": time.monotonic() - began, "cpu_seconds": used.ru_utime + used.ru_stime}
    print(json.dumps({"moments": dict(moments), "too_old": dict(too_old), "num_runs": num_runs, **times}))


if __name__ == "__main__":
    main()
