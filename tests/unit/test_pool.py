"""The task pool: near-duplicates against all pairs, difficulty and splits by hand, files that training takes back."""

import itertools
import json
import random

import pytest
import yaml

from sandbox_cluster.tasks.loader import load_tasks
from slime_cua.config.base import load
from slime_cua.config.pool import PoolConfig
from slime_cua.config.run import RunConfig
from slime_cua.core.errors import ConfigError, DataError, InfrastructureError
from slime_cua.core.files import write_atomic
from slime_cua.core.types import Episode, EpisodeGroup, Task
from slime_cua.data.episodes import EpisodeStore
from slime_cua.launch.run_dir import RunDir
from slime_cua.synthesis import pool, pool_build
from slime_cua.synthesis.near_duplicates import clusters, jaccard, normalised, shingles

EVALUATOR = {"func": "infeasible"}


def task(number, instruction=None, family="calc", apps=()):
    text = instruction or f"{'abcdefghijklmnopqrstuvwxyz'[number % 26] * 9} number {number * 7919}"
    return Task(
        id=f"t{number}", instruction=text, evaluator=EVALUATOR, family=family, related_apps=tuple(apps)
    )


def episode(task_id, number, reward):
    return Episode(
        episode_id=f"{task_id}-{number}",
        group_id=task_id,
        task_id=task_id,
        turns=(),
        reward=reward,
        stop_reason="terminated" if reward is not None else "invalid",
        error=None if reward is not None else "SandboxError: no desktop",
    )


def measured(tasks, rates, **options):
    """Each task with four attempts, `rate` of them 1."""
    config = PoolConfig(num_attempts=4, **options)
    episodes = [
        episode(one.id, n, float(n < 4 * rate))
        for one, rate in zip(tasks, rates, strict=True)
        for n in range(4)
    ]
    return pool.measure(tasks, episodes, config), config


def test_shingles_and_jaccard_by_hand():
    assert normalised("Press the  BLUE button!") == "press the blue button"
    assert shingles("abcdefg") == {"abcde", "bcdef", "cdefg"}
    assert shingles("Ab!") == {"ab"}
    assert jaccard(shingles("abcdefg"), shingles("abcdefh")) == 2 / 4


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_clusters_are_those_of_comparing_all_pairs(seed, threshold):
    rng = random.Random(seed)
    words = ["save", "file", "as", "open", "the", "blue", "sheet", "window", "copy", "it"]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 7))) for _ in range(60)]
    texts += [texts[n] + " now" for n in range(0, 60, 7)]
    group = list(range(len(texts)))
    for a, b in itertools.combinations(range(len(texts)), 2):
        if jaccard(shingles(texts[a]), shingles(texts[b])) >= threshold:
            low, high = sorted((group[a], group[b]))
            group = [low if name == high else name for name in group]
    assert clusters(texts, threshold) == group


def test_moderate_tasks_are_kept_and_the_others_say_why_not():
    tasks = [task(n) for n in range(5)]
    found, _ = measured(tasks, [0.0, 0.25, 0.75, 1.0, 0.5])
    assert [one.verdict for one in found] == ["too hard", "kept", "kept", "too easy", "kept"]
    assert [one.pass_rate for one in found] == [0.0, 0.25, 0.75, 1.0, 0.5]
    found, _ = measured(tasks, [0.0, 0.25, 0.75, 1.0, 0.5], min_pass_rate=0.0, max_pass_rate=0.25)
    assert [one.verdict for one in found] == ["kept", "kept", "too easy", "too easy", "too easy"]


def test_failures_of_desktops_are_no_failures_of_the_policy():
    config = PoolConfig(num_attempts=6, min_valid_attempts=2)
    episodes = [episode("t0", n, reward) for n, reward in enumerate([None, 1.0, None, 0.0, None, None])]
    (found,) = pool.measure([task(0)], episodes, config)
    assert (found.pass_rate, found.num_invalid, found.verdict) == (0.5, 4, "kept")
    (found,) = pool.measure([task(0)], episodes[:3], config)
    assert (found.pass_rate, found.verdict) == (None, "not measured")
    with pytest.raises(DataError, match="task other, which is no candidate"):
        pool.measure([task(0)], [episode("other", 0, 1.0)], config)


def test_a_pass_is_a_score_above_the_threshold():
    config = PoolConfig(num_attempts=4, success_threshold=0.5)
    assert pool.pass_rate([0.5, 0.51, 1.0, 0.0], config) == 0.5


def test_of_near_duplicates_the_most_moderate_stay():
    same = "Open the quarterly report and make every heading bold"
    tasks = [task(0, same), task(1, same + "."), task(2, same + " now"), task(3)]
    found, _ = measured(tasks, [0.25, 0.75, 0.5, 0.25], max_per_cluster=1)
    assert [one.cluster for one in found] == ["t0", "t0", "t0", "t3"]
    assert [one.verdict for one in found] == ["near-duplicate", "near-duplicate", "kept", "kept"]
    assert [one.verdict for one in measured(tasks, [0.25] * 4)[0]] == ["kept"] * 4


def pool_of(num_tasks):
    """Tasks in three apps; every third task is a near-duplicate of the one before it."""
    tasks = []
    for n in range(num_tasks):
        text = None if n % 3 != 2 else tasks[-1].instruction + "."
        tasks.append(task(n, text, family=("calc", "writer", "gimp")[n * 3 // num_tasks]))
    return tasks


@pytest.mark.parametrize("by", ["task", "cluster", "app"])
@pytest.mark.parametrize("seed", range(5))
def test_the_two_sides_share_nothing_that_was_to_be_kept_apart(by, seed):
    tasks = pool_of(90)
    found, config = measured(tasks, [0.5] * 90, split_by=by, seed=seed, heldout_share=0.3)
    train, heldout = pool.split(found, config)
    ids = [{one.task.id for one in side} for side in (train, heldout)]
    assert not ids[0] & ids[1] and len(ids[0] | ids[1]) == 90
    assert pool.split(found, config) == (train, heldout)
    names = {
        "task": lambda one: one.task.id,
        "cluster": lambda one: one.cluster,
        "app": lambda one: one.task.family,
    }
    sides = [{names[by](one) for one in side} for side in (train, heldout)]
    assert not sides[0] & sides[1] and all(sides)
    assert abs(len(heldout) - 27) <= 3
    if by != "app":
        apps = [sum(one.task.family == app for one in heldout) for app in ("calc", "writer", "gimp")]
        assert all(abs(count - 9) <= 1 for count in apps), "each app gives its share"


def test_a_task_of_two_apps_joins_them():
    apps = [("calc",), ("calc", "writer"), ("writer",), ("gimp",)]
    tasks = [task(n, apps=names) for n, names in enumerate(apps)]
    found, config = measured(tasks, [0.5] * 4, split_by="app", heldout_share=0.25)
    train, heldout = pool.split(found, config)
    assert [one.task.id for one in heldout] == ["t3"]
    assert len(train) == 3


def test_what_cannot_be_split_is_said():
    same = "Open the quarterly report and make every heading bold"
    found, config = measured([task(0, same), task(1, same)], [0.5, 0.5])
    with pytest.raises(DataError, match="they are all one cluster; give more candidates"):
        pool.split(found, config)
    none = config.model_copy(update={"heldout_share": 0.0})
    assert pool.split(found, none) == (found, [])


def test_the_histogram_counts_every_candidate_once():
    found, _ = measured([task(n) for n in range(5)], [0.0, 0.25, 0.25, 0.75, 1.0])
    bars = dict(pool.histogram(found))
    assert (bars["0"], bars["0.2-0.3"], bars["0.7-0.8"], bars["1"]) == (1, 2, 1, 1)
    assert sum(bars.values()) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["pool.min_pass_rate=0.8", "pool.max_pass_rate=0.2"], "no task can be between them"),
        (["pool.num_attempts=2"], "min_valid_attempts = 4 is above pool.num_attempts = 2"),
        (["pool.num_attempts=0"], "pool.num_attempts = 0: Input should be greater than or equal to 1"),
        (["pool.split_by=color"], "Input should be 'task', 'cluster' or 'app'"),
        (["pool.min_pass_rat=0.1"], "unknown key pool.min_pass_rat; did you mean min_pass_rate"),
    ],
)
def test_wrong_bounds_are_a_sentence(options, message):
    with pytest.raises(ConfigError, match=message):
        load(RunConfig, None, options)


def written_tasks(folder, tasks):
    folder.mkdir(exist_ok=True)
    (folder / "tasks.jsonl").write_text(
        "".join(json.dumps(one.model_dump(mode="json", exclude={"is_infeasible"})) + "\n" for one in tasks)
    )
    return folder


def config_for(tmp_path, *overrides):
    own = [f"run_dir={tmp_path / 'out' / 'run'}", f"tasks.train=[{tmp_path / 'tasks'}]", "model=some/model"]
    return load(RunConfig, None, [*own, "pool.num_attempts=4", *overrides])


def played(config, tasks, rates):
    """The store of a build whose attempts are all there, in the order in which they are played."""
    store = EpisodeStore(config_path(config))
    for number, one in enumerate(pool_build.items(config, tasks)):
        attempt, key = number // len(tasks), f"pool-{number:05d}"
        reward = float(attempt < config.pool.num_attempts * rates[one.id])
        played_one = episode(one.id, attempt, reward).model_copy(update={"group_id": key})
        store.append(EpisodeGroup(group_id=key, task_id=one.id, episodes=(played_one,), admitted_version=0))


def config_path(config):
    from pathlib import Path

    return Path(config.run_dir) / "episodes" / "pool.jsonl"


def test_a_finished_build_chooses_from_its_attempts_and_training_takes_the_files(tmp_path):
    written_tasks(tmp_path / "tasks", pool_of(12))
    config, out = config_for(tmp_path), tmp_path / "out"
    tasks = load_tasks(config.tasks.train)
    rates = {one.id: (0.0, 0.5, 0.75, 1.0)[n % 4] for n, one in enumerate(tasks)}
    with RunDir(config):
        played(config, tasks, rates)
    text = pool_build.build(config, out)
    assert "6 kept; 3 too easy; 3 too hard" in text
    pools = {name: load_tasks([out / f"{name}.jsonl"]) for name in ("train", "heldout")}
    kept = [*pools["train"], *pools["heldout"]]
    assert {one.id for one in kept} == {one.id for one in tasks if rates[one.id] in (0.5, 0.75)}
    assert all(one.metadata["pool"]["pass_rate"] == rates[one.id] for one in kept)
    assert {one.metadata["pool"]["model"] for one in kept} == {"some/model"}
    assert {one.split for one in pools["train"]} == {"train"}
    by_id = {one.id: one for one in tasks}
    for one in kept:
        assert one.model_copy(update={"metadata": {}, "split": ""}) == by_id[one.id]
    summary = yaml.safe_load((out / "pool.yaml").read_text())
    assert len(summary["candidates"]) == 12 and summary["provenance"]["model"] == "some/model"
    # other bounds: chosen again, nothing is played
    text = pool_build.build(config_for(tmp_path, "pool.max_pass_rate=0.5"), out)
    assert "3 kept; 6 too easy; 3 too hard" in text
    with pytest.raises(DataError, match="none of 12 candidates"):
        pool_build.build(config_for(tmp_path, "pool.min_pass_rate=0.6", "pool.max_pass_rate=0.7"), out)
    assert not (out / "train.jsonl").exists(), "an earlier choice is no longer what pool.yaml says"


@pytest.mark.parametrize("num_written", [0, 1, 2])
def test_a_build_that_is_killed_leaves_no_side_of_an_earlier_one(tmp_path, monkeypatch, num_written):
    """A second build with other bounds ends after it has written `num_written` files."""
    written_tasks(tmp_path / "tasks", pool_of(12))
    config, out = config_for(tmp_path), tmp_path / "out"
    tasks = load_tasks(config.tasks.train)
    with RunDir(config):
        played(config, tasks, {one.id: (0.0, 0.5, 0.75, 1.0)[n % 4] for n, one in enumerate(tasks)})
    pool_build.build(config, out)
    before = {name: (out / f"{name}.jsonl").read_bytes() for name in ("train", "heldout")}
    written = []

    def killed_later(path, data):
        if len(written) == num_written:
            raise KeyboardInterrupt
        write_atomic(path, data)
        written.append(path.stem)

    monkeypatch.setattr(pool_build, "write_atomic", killed_later)
    with pytest.raises(KeyboardInterrupt):
        pool_build.build(config_for(tmp_path, "pool.max_pass_rate=0.5"), out)
    there = {name for name in before if (out / f"{name}.jsonl").exists()}
    assert there == set(written) and all((out / f"{n}.jsonl").read_bytes() != before[n] for n in there)


def test_an_unfinished_build_is_known_as_one_and_more_attempts_add_to_it(tmp_path):
    written_tasks(tmp_path / "tasks", pool_of(3))
    config = config_for(tmp_path)
    tasks = load_tasks(config.tasks.train)
    played(config, tasks, dict.fromkeys(("t0", "t1", "t2"), 0.5))
    assert len(pool_build.stored(config, tasks)) == 12
    more = config_for(tmp_path, "pool.num_attempts=5")
    assert pool_build.stored(more, tasks) is None
    assert pool_build.items(more, tasks)[:12] == pool_build.items(config, tasks)
    path = config_path(config)
    path.write_bytes(path.read_bytes()[:-10])  # killed while writing
    assert pool_build.stored(config, tasks) is None


def test_attempts_at_other_candidates_are_not_mixed_in(tmp_path):
    tasks = pool_of(4)
    pool_build.check_candidates(tmp_path, tasks)
    pool_build.check_candidates(tmp_path, tasks)
    with pytest.raises(ConfigError, match="1 gone, for example t3"):
        pool_build.check_candidates(tmp_path, tasks[:3])
    changed = [*tasks[:3], tasks[3].model_copy(update={"instruction": "other"})]
    with pytest.raises(ConfigError, match="1 changed, for example t3"):
        pool_build.check_candidates(tmp_path, changed)
    with pytest.raises(ConfigError, match="their order changed"):
        pool_build.check_candidates(tmp_path, tasks[::-1])


def test_no_candidates_none_measured_and_none_moderate_are_sentences(tmp_path):
    with pytest.raises(ConfigError, match="there are no candidates: give --tasks"):
        pool_build.build(load(RunConfig, None, []), tmp_path)
    tasks, config = pool_of(3), config_for(tmp_path)
    with pytest.raises(
        InfrastructureError, match=r"no candidate has 4 scored attempts .* SandboxError: no desktop"
    ):
        pool_build.choose(config, tasks, [episode("t0", n, None) for n in range(4)], tmp_path)
    easy = [episode(one.id, n, 1.0) for one in tasks for n in range(4)]
    with pytest.raises(
        DataError, match=r"none of 3 candidates has a pass rate within 0.1 to 0.9(.|\n)*3 too easy"
    ):
        pool_build.choose(config, tasks, easy, tmp_path)
    assert len(yaml.safe_load((tmp_path / "pool.yaml").read_text())["candidates"]) == 3
    assert not (tmp_path / "train.jsonl").exists()
