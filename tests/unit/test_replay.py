"""The replay: its clock and machines against hand-worked times, its schedules against what they promise."""

import asyncio
import time

import pytest

from rollout.replay.bound import idle_bound
from rollout.replay.clock import Stalled, run_virtual
from rollout.replay.generate import GeneratedTrace
from rollout.replay.machines import Engine
from rollout.replay.policies import DEFAULT, OPTIONS, POLICIES, ours
from rollout.replay.report import comparison, goals, ks_test, trace_text
from rollout.replay.scenario import PRESETS, ScenarioConfig, SiteConfig, TasksConfig
from rollout.replay.simulate import mean_step_tokens, simulate
from rollout.replay.trace import (
    EpisodeTrace,
    GroupTrace,
    RecordedTrace,
    TurnTrace,
    drawn_groups,
    measured_scenario,
    read_trace,
)
from rollout.scheduler import Scheduler
from slime_cua.cli import main as cli
from slime_cua.core.types import Episode, EpisodeGroup, Turn
from slime_cua.data.episodes import EpisodeStore

EXACT = SiteConfig(
    num_desktops=4,
    num_engines=1,
    decode_s=0.1,
    decode_s_per_request=0.0,
    prefill_tokens_per_s=1e12,
    publish_s=0.0,
    step_s=10.0,
    step_token_share=0.0,
)


def episode(act_s, reward=1.0, tokens=0):
    return EpisodeTrace(0.0, 0.0, (TurnTrace(1, 1, tokens, act_s),), 0.0, reward, 1)


def trace_of(*seconds):
    """A group of two equal episodes for each entry, tasks a, b, c, ... in turn."""
    groups = [GroupTrace(chr(97 + n), (episode(s), episode(s, 0.0))) for n, s in enumerate(seconds)]
    return RecordedTrace(groups)


def scenario(num_steps, **options):
    return ScenarioConfig(
        num_steps=num_steps,
        groups_per_step=1,
        episodes_per_group=2,
        site=options.pop("site", EXACT),
        **options,
    )


def test_the_clock_jumps_and_a_deadlock_is_an_error_not_a_hang():
    async def wait(seconds):
        await asyncio.sleep(seconds)
        return asyncio.get_running_loop().time()

    async def both():
        return await asyncio.gather(wait(86400.0), wait(0.25))

    assert run_virtual(both()) == [86400.0, 0.25]
    with pytest.raises(Stalled, match="deadlock"):
        run_virtual(asyncio.Event().wait())


def test_requests_share_an_engine_and_its_step_grows_with_the_batch():
    site = EXACT.model_copy(update={"decode_s_per_request": 0.05})

    async def main():
        engine, clock = Engine(site), asyncio.get_running_loop().time

        async def one(tokens):
            await engine.generate(TurnTrace(0, 0, tokens, 0.0), knows_prompt=True)
            return clock()

        return await asyncio.gather(one(10), one(20))

    # together 0.15 s a token: the short one ends at 1.5; the other has 10 left at 0.1 s
    assert run_virtual(main()) == pytest.approx([1.5, 2.5])


def test_new_weights_stop_an_engine_then_the_prompt_is_read_again_and_tokens_carry_two_versions():
    site = EXACT.model_copy(update={"prefill_tokens_per_s": 10.0})

    async def main():
        engine, clock = Engine(site), asyncio.get_running_loop().time

        async def publish():
            await asyncio.sleep(2.0)
            engine.pause()
            await asyncio.sleep(5.0)
            engine.resume(1)

        pieces, _ = await asyncio.gather(
            engine.generate(TurnTrace(10, 30, 20, 0.0), knows_prompt=True), publish()
        )
        return pieces, clock()

    pieces, end = run_virtual(main())
    assert pieces == {0: 10, 1: 10}, "1 s to read 10 tokens, 1 s for 10 samples before the pause"
    assert end == pytest.approx(7.0 + (30 + 10) / 10 + 1.0), "then 40 tokens are read and 10 sampled"


def test_a_full_engine_lets_requests_wait():
    async def main():
        engine = Engine(EXACT.model_copy(update={"max_batch": 1}))
        turn = TurnTrace(0, 0, 10, 0.0)
        await asyncio.gather(*(engine.generate(turn, knows_prompt=True) for _ in range(3)))
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(3.0)


def test_schedules_by_hand():
    """Episodes of 30, 5, 5, 5 s and steps of 10 s, one group a step."""
    trace = trace_of(30.0, 5.0, 5.0, 5.0)
    ends = {
        name: simulate(trace, scenario(4), POLICIES[name]).step_ends_s
        for name in ("sync", "one_step_off", "ours_1")
    }
    assert ends["sync"] == pytest.approx([40, 55, 70, 85])
    # the last step's weights wait for the next rollout, the 30 again
    assert ends["one_step_off"] == pytest.approx([40, 50, 60, 90])
    # 30 and 5 start at 0; 5 is trained 5..15, the third starts at 15, the step of version 1 waits for the 30
    assert ends["ours_1"] == pytest.approx([15, 40, 50, 60])


def test_one_step_off_holds_new_weights_until_the_next_rollout_is_whole():
    result = simulate(trace_of(5.0, 30.0, 5.0), scenario(3), POLICIES["one_step_off"])
    assert result.step_ends_s == pytest.approx([35, 45, 55]), "the first step's weights wait for the 30"
    assert max(result.lag_tokens, default=0) <= 1


def test_fully_asynchronous_work_grows_old_and_discarding_throws_it_away():
    site = EXACT.model_copy(update={"num_desktops": 8})
    groups = [
        GroupTrace(f"t{n}", (episode(s, tokens=10),) * 2) for n, s in enumerate([60.0, 2.0, 2.0, 2.0] * 6)
    ]
    trace = RecordedTrace(groups)
    free, discarding = (
        simulate(trace, scenario(8, site=site), POLICIES[name]) for name in ("unbounded", "discard")
    )
    assert max(free.lag_tokens) > 1
    assert free.lost_tokens == 0
    assert max(discarding.lag_tokens) <= 1
    assert discarding.lost_tokens > 0
    assert discarding.counts["num_stale"] > 0


def mean_tokens(config):
    return mean_step_tokens(GeneratedTrace(config), config)


def test_the_bound_holds_the_same_groups_and_foresight_comes_near_it():
    """Groups of like length after each other: the schedule that foresees durations waits little more than the bound."""
    config = ScenarioConfig(
        num_steps=30, groups_per_step=2, episodes_per_group=2, site=SiteConfig(num_desktops=16, publish_s=0.0)
    )
    results = [
        simulate(GeneratedTrace(config), config, POLICIES[name])
        for name in ("ours_1", "tasks_known", "foreseeing")
    ]
    bounds = [idle_bound(r.admitted, r.trained, config, 1, mean_tokens(config)) for r in results]
    gaps = [r.trainer_idle - b.share_any_order for r, b in zip(results, bounds, strict=True)]
    assert gaps[0] > gaps[1] > gaps[2] > 0, "what is known of durations shortens the wait"
    assert [r.trainer_idle >= b.share_start_order for r, b in zip(results, bounds, strict=True)] == [True] * 3


@pytest.mark.parametrize("name", [*DEFAULT, *OPTIONS])
def test_every_schedule_keeps_its_bound_and_counts_every_token_once(name):
    small = ScenarioConfig(
        num_steps=6,
        groups_per_step=2,
        episodes_per_group=4,
        site=SiteConfig(num_desktops=16, num_engines=1),
        tasks=TasksConfig(num_tasks=16, failure_rate=0.1),
    )
    policy = POLICIES[name]
    result = simulate(GeneratedTrace(small), small, policy)
    assert result.num_groups == 12
    if policy.max_lag is not None:
        assert max(result.lag_tokens) <= policy.max_lag
    trained = sum(result.lag_tokens.values()) + result.masked_tokens
    assert trained == sum(e.response_tokens for e in result.trained_episodes)
    assert trained + result.lost_tokens <= result.sampled_tokens
    assert (
        0 < result.busy["trainer"] <= 1
        and 0 < result.busy["desktops"] <= 1
        and 0 < result.busy["engines"] <= 1
    )
    if policy.has_no_discard and policy.max_lag is not None:
        bound = idle_bound(result.admitted, result.trained, small, policy.max_lag, mean_tokens(small))
        assert result.trainer_idle >= bound.share_any_order
        assert bound.any_order_s <= bound.reachable_s + 1e-6


def test_a_replay_is_the_same_every_time_and_every_schedule_sees_the_same_groups():
    small = ScenarioConfig(
        num_steps=3, groups_per_step=2, episodes_per_group=2, tasks=TasksConfig(num_tasks=8)
    )
    first, second = (simulate(GeneratedTrace(small), small, ours(1)) for _ in range(2))
    assert first.step_ends_s == second.step_ends_s
    sync = simulate(GeneratedTrace(small), small, POLICIES["sync"])
    assert {g.task_id: g for g in first.trained}.items() >= {
        g.task_id: g for g in sync.trained if g in first.trained
    }.items()
    assert set(first.trained[0].episodes) & {e for g in sync.admitted for e in g.episodes}


def test_drawn_ahead_tasks_of_like_duration_run_together_and_the_trainer_waits_less():
    trace = trace_of(*[100.0, 5.0] * 8)
    site = EXACT.model_copy(update={"num_desktops": 16})
    near = simulate(trace, scenario(16, site=site), ours(1))
    ahead = simulate(trace, scenario(16, site=site), ours(1, num_ahead_groups=8))
    assert ahead.trainer_idle < near.trainer_idle
    assert sorted(g.task_id for g in ahead.trained) != []
    assert max(ahead.lag_tokens, default=0) <= 1


def test_over_sampling_and_early_close_cut_off_the_slow_and_count_what_they_threw_away():
    slow = GroupTrace("a", tuple(episode(s, tokens=10) for s in (5.0, 6.0, 500.0, 7.0)))
    config = scenario(1, site=EXACT.model_copy(update={"num_desktops": 8})).model_copy(
        update={"episodes_per_group": 3}
    )
    waiting = simulate(RecordedTrace([slow]), config, POLICIES["sync"])
    assert waiting.seconds == pytest.approx(501 + 10, abs=2)
    more = simulate(RecordedTrace([slow]), config, ours(0, num_extra_episodes=1))
    assert more.seconds < 30
    assert len(more.trained_episodes) == 3
    early = simulate(RecordedTrace([slow]), config, ours(0, close_factor=3.0))
    assert early.seconds < 40
    assert (len(early.trained_episodes), early.lost_tokens) == (2, 10)


def test_generated_episodes_keep_to_what_is_given():
    config = ScenarioConfig()
    groups = drawn_groups(GeneratedTrace(config), 60)
    attempts = [e for group in groups for e in group.episodes if e.reward is not None]
    spans = [e.span_s(config.site.decode_s, 1 / config.site.prefill_tokens_per_s) for e in attempts]
    assert max(spans) <= 2400 + 20 and min(spans) >= 15
    assert max(len(e.turns) for e in attempts) <= 50
    assert 0.02 < sum(s > 1200 for s in spans) / len(spans) < 0.1
    assert len({group.task_id for group in groups}) == 60, "no task twice before all were drawn"
    short = PRESETS["short"]()
    spans = [e.span_s(0.012) for g in drawn_groups(GeneratedTrace(short), 30) for e in g.episodes]
    assert max(spans) < short.site.step_s


def test_the_ks_distance_and_p_value_by_hand():
    assert ks_test([1, 2, 3, 4], [1, 2, 3, 4]) == (0.0, 1.0)
    distance, p_value = ks_test([1, 2, 3, 4], [3, 4, 5, 6])
    assert distance == 0.5
    t = (2**0.5 + 0.12 + 0.11 / 2**0.5) * 0.5
    assert p_value == pytest.approx(
        2 * (2.718281828459045 ** (-2 * t * t) - 2.718281828459045 ** (-8 * t * t)), abs=1e-3
    )
    assert ks_test(range(100), range(60, 160))[1] < 1e-6


def recorded_run(folder):
    def turn(index, tokens):
        return Turn(
            index=index,
            starts_segment=index == 0,
            context_ids=tuple(range(7)),
            response_ids=tuple(range(tokens)),
            response_logp=(0.0,) * tokens,
            response_versions=(0,) * tokens,
            timings_s={"setup": 2.0, "generate": 1.0, "act": 3.0}
            if index == 0
            else {"generate": 1.0, "act": 3.0},
        )

    store = EpisodeStore(folder / "episodes" / "rl.jsonl")
    for number in range(3):
        episodes = [
            Episode(
                episode_id=f"g{number}-e{n}",
                group_id=f"g{number}",
                task_id=f"t{number}",
                turns=(turn(0, 4), turn(1, 6)),
                reward=float(n),
                stop_reason="terminated",
                started_s=100.0,
                ended_s=111.0,
            )
            for n in range(2)
        ]
        store.append(
            EpisodeGroup(
                group_id=f"g{number}", task_id=f"t{number}", episodes=tuple(episodes), admitted_version=0
            )
        )


def test_a_run_directory_becomes_a_trace_with_its_tokens_and_times(tmp_path):
    recorded_run(tmp_path)
    trace = read_trace(tmp_path)
    (first, *_) = trace.groups[0].episodes
    assert first.setup_s == 2.0
    assert first.turns == (TurnTrace(7, 7, 4, 3.0), TurnTrace(7, 18, 6, 3.0))
    assert first.judge_s == pytest.approx(11 - 2 - 2 - 6)
    assert [trace.draw(n) for n in range(4)] == ["t0", "t1", "t2", "t0"]


def test_a_run_directory_is_replayed_with_its_own_desktops_and_groups_a_step(tmp_path):
    recorded_run(tmp_path)
    base = PRESETS["long_tail"]()
    assert measured_scenario(base, tmp_path).site.num_desktops == base.site.num_desktops
    (tmp_path / "config.yaml").write_text("{sandbox: {num_desktops: 6}, rollout: {groups_per_step: 3}}\n")
    found = measured_scenario(base, tmp_path)
    assert (found.site.num_desktops, found.groups_per_step, found.episodes_per_group) == (6, 3, 2)


def test_the_command_replays_a_run_and_prints_trace_tables_and_goals(tmp_path, capsys):
    recorded_run(tmp_path)
    overrides = [
        "num_steps=3",
        "groups_per_step=1",
        "episodes_per_group=2",
        "site.step_s=2",
        "site.num_desktops=4",
    ]
    out = tmp_path / "report.md"
    arguments = [
        "simulate",
        "--trace",
        str(tmp_path),
        "--policies",
        "sync,ours_1",
        "--out",
        str(out),
        *overrides,
    ]
    assert cli(arguments) == 0
    text = capsys.readouterr().out
    assert "ours, lag 1" in text and "KS groups" in text and "least, any order" in text
    assert out.read_text() == text
    assert cli(["simulate", "--policies", "nonsense"]) == 1
    assert "there are sync" in capsys.readouterr().err
    assert cli(["simulate", "--trace", str(tmp_path / "none")]) == 1
    assert cli(["simulate", "num_stepz=3"]) == 1


def test_reports_say_what_is_met_and_what_is_not():
    config = scenario(4)
    trace = trace_of(30.0, 5.0, 5.0, 5.0)
    names = ("sync", "one_step_off", "ours_1", "ours_1_ahead")
    replays = [simulate(trace, config, POLICIES[name]) for name in names]
    bounds = {
        r.policy.name: idle_bound(
            r.admitted, r.trained, config, r.policy.max_lag, mean_step_tokens(trace, config)
        )
        for r in replays
    }
    text = goals(replays, bounds)
    assert "NOT MET 1.42x the groups/h of synchronous (goal 1.9x)" in text
    assert "  met     greatest lag 0 (goal 1)" in text
    assert "\nours, lag 1, 64 drawn ahead (rollout.scheduler.num_ahead_groups = 64):\n" in text
    assert comparison(replays, bounds).count("\n| ours, lag 1 |") == 3
    assert "longest of a step's groups" in trace_text(trace, config)


def test_five_minutes_of_4096_desktops_cost_the_scheduler_under_one_per_cent_of_a_core_per_1000():
    """A turn of every desktop each 14 s, a group of 8 ending each 6 minutes of a desktop, two steps."""
    s = Scheduler(groups_per_step=256, max_policy_lag=1)
    for n in range(512):
        s.record_duration(f"t{n}", float(n))
    begun = time.thread_time()
    turns, endings = 4096 * 300 // 14, 512 * 300 // 360
    s.enqueue(f"t{n}" for n in range(s.num_to_draw()))
    for task in s.dequeue():
        s.admit(f"g{s.num_admitted}", task)
    for turn in range(turns):
        s.record_version(f"g{turn % 512}", 0)
        if turn % (turns // endings) == 0 and turn // (turns // endings) < 512:
            s.finish(f"g{turn // (turns // endings)}")
            batch = s.next_batch()
            if batch is not None:
                s.trained(batch)
    assert s.version >= 1
    assert time.thread_time() - begun < 0.01 * 4.096 * 300
