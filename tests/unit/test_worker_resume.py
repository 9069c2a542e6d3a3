"""A rollout side that is lost between two moments goes on: the same draws, finished episodes kept, nothing counted twice."""

import asyncio
import json
from collections import Counter

import pytest

from rollout.episode import _Trace
from rollout.group import run_group
from rollout.player import Player
from rollout.replay.clock import run_virtual
from rollout.scheduler import Scheduler
from rollout.worker import RolloutWorker
from slime_cua.algo.frontier import FrontierSampler
from slime_cua.config.rollout import RolloutConfig, SchedulerConfig
from slime_cua.core.errors import DataError, InfrastructureError, SandboxError
from slime_cua.core.types import Episode, Task, Turn
from slime_cua.data.episodes import EpisodeStore, OpenGroups

TASKS = ("a", "b", "c", "d")


class Rig:
    """One life of a rollout side over a folder. Episode n of a group ends n + 1 seconds after it began; some fail."""

    def __init__(self, folder, state=None, **options):
        self.config = RolloutConfig(
            groups_per_step=2, episodes_per_group=3, max_infra_retries=1, scheduler=SchedulerConfig(**options)
        )
        sampler = FrontierSampler(TASKS, seed=1)
        scheduler = Scheduler(2, 1, options=self.config.scheduler)
        if state is not None:
            sampler.load_state_dict(state["sampler"])
            scheduler = Scheduler.from_state_dict(state["scheduler"], self.config.scheduler)
        self.played = Counter()
        self.worker = RolloutWorker(
            self.config,
            {name: Task(id=name, instruction="") for name in TASKS},
            sampler,
            scheduler,
            EpisodeStore(folder / "rl.jsonl"),
            self.play,
            open_groups=OpenGroups(folder / "open"),
        )
        self.num_cut = self.worker.restore(state) if state is not None else 0
        self.worker.hold()

    async def play(self, task, group_id, episode_id, on_request):
        version = self.worker.serving_version
        on_request()
        number = int(episode_id.rsplit("-e", 1)[1])
        await asyncio.sleep(number + 1.0)
        self.played[episode_id] += 1
        return episode(task.id, group_id, episode_id, version)

    async def live(self, num_steps, seconds):
        """Steps, then `seconds` more, then the end without any clean-up; the last state."""
        state = snapshot(self.worker.state_dict())
        self.worker.release()
        for _ in range(num_steps):
            batch = await self.worker.next_batch()
            state = snapshot(self.worker.commit([group.group_id for group in batch]))
            self.worker.release()
        await asyncio.sleep(seconds)
        return state


def episode(task_id, group_id, episode_id, version=0):
    number = int(episode_id.rsplit("-e", 1)[1])
    is_lost = number == 1
    turn = Turn(
        index=0,
        starts_segment=True,
        context_ids=(1,),
        response_ids=(2,),
        response_logp=(0.0,),
        response_versions=(version,),
    )
    return Episode(
        episode_id=episode_id,
        group_id=group_id,
        task_id=task_id,
        turns=(turn,),
        reward=None if is_lost else float(number % 4 == 0),
        stop_reason="invalid" if is_lost else "terminated",
        error="SandboxError: lost" if is_lost else None,
        started_s=10.0,
        ended_s=11.0 + number,
    )


def snapshot(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("seconds", [0.0, 1.5, 2.5, 3.5, 4.5])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_lost_worker_is_what_it_was_when_it_died_and_plays_no_finished_episode_again(
    tmp_path, num_steps, seconds
):
    first = Rig(tmp_path)
    state = run_virtual(first.live(num_steps, seconds))
    died = snapshot(first.worker.state_dict())
    second = Rig(tmp_path, state)
    alive = snapshot(second.worker.state_dict())
    for group in alive["scheduler"]["groups"] + died["scheduler"]["groups"]:
        group["oldest_version"] = group["oldest_version"] if group["is_finished"] else None
    assert alive == died
    run_virtual(second.live(2, 0.0))
    assert not [name for name in second.played if first.played[name]]
    stored = [group.group_id for group in EpisodeStore(tmp_path / "rl.jsonl")]
    assert len(set(stored)) == len(stored) == second.worker.num_stored
    assert {path.stem for path in (tmp_path / "open").iterdir()} <= set(second.worker.scheduler.groups)


def test_groups_admitted_by_a_step_start_only_after_its_state_is_out(tmp_path):
    async def run():
        rig = Rig(tmp_path)
        rig.worker.release()
        batch = await rig.worker.next_batch()
        before = set(rig.worker._running)
        rig.worker.commit([group.group_id for group in batch])
        assert len(rig.worker.scheduler.groups) == 4 and set(rig.worker._running) <= before
        assert rig.worker.serving_version == 0, "the new weights are not out yet"
        rig.worker.release()
        assert len(rig.worker._running) == 2 + len(before & set(rig.worker.scheduler.groups))
        assert rig.worker.serving_version == 1
        await rig.worker.stop()

    run_virtual(run())


def test_what_does_not_follow_from_the_state_is_cut_off_and_a_missing_group_is_named(tmp_path):
    state = run_virtual(Rig(tmp_path).live(1, 0.0))
    whole = (tmp_path / "rl.jsonl").read_bytes()
    strange = episode("a", "g000099", "g000099-e0")
    store = EpisodeStore(tmp_path / "rl.jsonl")
    store.append(store.read()[0].model_copy(update={"group_id": "g000099", "episodes": (strange,)}))
    num_bytes = store.num_bytes - len(whole)
    again = Rig(tmp_path, state)
    assert again.num_cut == num_bytes and (tmp_path / "rl.jsonl").read_bytes() == whole
    lost = {**state, "finished": {"g000000": 0} if "g000000" in state["finished"] else {"g000050": 0}}
    with pytest.raises(DataError, match=r"does not hold group g0000\d0, which the run state still needs"):
        Rig(tmp_path, {**lost, "finished": {"g000050": 0}})


def test_a_line_that_a_crash_cut_is_no_part_of_the_next_state(tmp_path):
    state = run_virtual(Rig(tmp_path).live(1, 0.0))
    whole = (tmp_path / "rl.jsonl").read_bytes()
    with (tmp_path / "rl.jsonl").open("ab") as file:
        file.write(whole[:100])
    second = Rig(tmp_path, state)
    assert second.worker.state_dict()["store_bytes"] == len(whole)
    state = run_virtual(second.live(2, 2.0))
    third = Rig(tmp_path, state)
    assert third.num_cut == 0 and third.worker.num_stored == second.worker.num_stored


def test_a_group_goes_on_with_its_finished_attempts_and_their_replacements():
    async def play(name):
        played.append(name)
        await asyncio.sleep(1.0)
        return episode("t", "g", name)

    played = []
    finished = [episode("t", "g", "g-e1"), episode("t", "g", "g-e0")]
    group = run_virtual(
        run_group(
            play,
            group_id="g",
            task_id="t",
            num_episodes=3,
            max_retries=1,
            admitted_version=4,
            finished=finished,
        )
    )
    assert played == ["g-e2", "g-e3"], "e3 replaces e1, which had failed before the interruption"
    assert [one.episode_id for one in group.episodes] == ["g-e0", "g-e1", "g-e2", "g-e3"]
    assert group.admitted_version == 4


def test_an_open_group_forgets_a_cut_line_and_what_was_played_for_another_task(tmp_path):
    groups = OpenGroups(tmp_path)
    groups.append(episode("t", "g", "g-e0"))
    groups.append(episode("other", "g", "g-e2"))
    with (tmp_path / "g.jsonl").open("ab") as file:
        file.write(b'{"episode_id": "g-e')
    assert [one.episode_id for one in groups.episodes("g", "t")] == ["g-e0"]
    groups.append(episode("t", "g", "g-e3"))
    assert [one.episode_id for one in groups.episodes("g", "t")] == ["g-e0", "g-e3"]
    groups.keep_only({"h"})
    assert list(tmp_path.iterdir()) == []


def test_a_pool_that_never_scores_ends_with_the_reasons_and_the_count_survives_a_resume(tmp_path):
    class Broken(Rig):
        async def play(self, task, group_id, episode_id, on_request):
            await asyncio.sleep(1.0)
            return episode(task.id, group_id, episode_id).model_copy(
                update={"reward": None, "stop_reason": "invalid", "error": "SandboxError: no desktop boots"}
            )

    first = Broken(tmp_path)
    state = run_virtual(first.live(0, 3.0))
    num_before = first.worker.num_stored
    assert 0 < num_before < 3 * len(TASKS)
    second = Broken(tmp_path, state)
    with pytest.raises(InfrastructureError, match=r"12 groups in a row .*no desktop boots"):
        run_virtual(second.live(1, 0.0))
    assert second.worker.num_stored == 12, "those before the interruption count"


async def test_a_clock_that_is_set_back_gives_no_negative_duration(monkeypatch):
    hours = iter([50_000.0])
    monkeypatch.setattr("time.time", lambda: next(hours, 1_000.0))

    class NoDesktop:
        def lease(self, task, episode_id):
            raise SandboxError("the gateway has no host")

    player = Player(None, NoDesktop(), 1)
    lost = await player.play(Task(id="t", instruction=""), None, group_id="g", episode_id="g-e0")
    assert lost.started_s == 50_000.0 and 0.0 <= lost.ended_s - lost.started_s < 60.0
    ended = _Trace("g-e0", "g", "t", started_s=50_000.0).finish()
    assert 0.0 <= ended.ended_s - ended.started_s < 60.0
