"""The comparison in words and tables: throughput, busy shares, lag, what was thrown away, bias, and the bound beside."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollout.replay.bound import IdleBound
from rollout.replay.scenario import ScenarioConfig
from rollout.replay.simulate import Replay, mean_step_tokens, nominal_s, step_seconds, valid_attempts
from rollout.replay.trace import GroupTrace, Trace, drawn_groups

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


def ks_test(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Two-sample Kolmogorov-Smirnov: (greatest distance of the two distributions, asymptotic p-value).

    Source: p = 2 sum_j (-1)^(j-1) exp(-2 j^2 t^2), t = (sqrt(n) + 0.12 + 0.11 / sqrt(n)) D, n = n1 n2 / (n1 + n2)
    (Stephens 1970). ValueError for an empty sample.
    """
    if not first or not second:
        raise ValueError("a Kolmogorov-Smirnov test needs two samples that are not empty")
    a, b = sorted(first), sorted(second)
    i = j = 0
    distance = 0.0
    while i < len(a) and j < len(b):
        value = min(a[i], b[j])
        while i < len(a) and a[i] == value:
            i += 1
        while j < len(b) and b[j] == value:
            j += 1
        distance = max(distance, abs(i / len(a) - j / len(b)))
    root = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    t = (root + 0.12 + 0.11 / root) * distance
    if t < 0.2:
        return distance, 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * k * k * t * t) for k in range(1, 101))
    return distance, min(1.0, max(0.0, 2 * math.fsum(terms)))


def quantiles(values: Sequence[float]) -> list[float]:
    """Values at QUANTILES, by the nearest rank."""
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in QUANTILES]


def trace_text(trace: Trace, scenario: ScenarioConfig) -> str:
    """What the trace is like: durations of episodes and groups, turns, step time."""
    groups = drawn_groups(trace, scenario.num_steps * scenario.groups_per_step)
    token_s, read_s = scenario.site.decode_s, 1 / scenario.site.prefill_tokens_per_s
    attempts = [episode for group in groups for episode in valid_attempts(group, scenario)]
    episodes = [episode.span_s(token_s, read_s) for episode in attempts]
    spans = [nominal_s(group, scenario) for group in groups]
    batches = [
        spans[k : k + scenario.groups_per_step] for k in range(0, len(spans), scenario.groups_per_step)
    ]
    mean = mean_step_tokens(trace, scenario)
    tokens = [sum(e.train_tokens for e in valid_attempts(group, scenario)) for group in groups]
    steps = [
        step_seconds(scenario.site, sum(tokens[k : k + scenario.groups_per_step]), mean)
        for k in range(0, len(tokens), scenario.groups_per_step)
    ]
    rows = [
        ("episode, s", episodes),
        ("group (its longest episode), s", spans),
        ("longest of a step's groups in draw order, s", [max(batch) for batch in batches]),
        ("turns an episode", [float(len(episode.turns)) for episode in attempts]),
        ("optimiser step in draw order, s", steps),
    ]
    header = " | ".join(f"{q:.0%}" for q in QUANTILES)
    lines = [
        f"Trace {trace.name}: {len(groups)} groups of {scenario.episodes_per_group} episodes, "
        f"{scenario.num_steps} steps of {scenario.groups_per_step} groups, {scenario.site.num_desktops} desktops, "
        f"{scenario.site.num_engines} engines, {scenario.site.publish_s:g} s to publish; seed {scenario.seed}.",
        "",
        f"| quantity | mean | {header} |",
        "|---|---" + "|---" * len(QUANTILES) + "|",
    ]
    for name, values in rows:
        cells = " | ".join(map(_number, quantiles(values)))
        lines.append(f"| {name} | {_number(sum(values) / len(values))} | {cells} |")
    return "\n".join(lines)


def comparison(replays: Sequence[Replay], bounds: dict[str, IdleBound]) -> str:
    """Tables over policies; `bounds` by policy name, for those that throw nothing away."""
    rates = {replay.policy.name: replay.groups_per_hour for replay in replays}
    base = {name: rates.get(label) for name, label in BASELINES.items()}
    lines = [
        "| schedule | groups/h | x sync | x one-step-off | trainer busy | trainer waits | least, same start order "
        "| least, any order | reached by one that foresees all "
        "| engines busy | desktops busy | lag max | lag 0, 1, 2, ... of trained tokens | thrown away | masked |",
        "|---" * 15 + "|",
    ]
    for replay in replays:
        bound = bounds.get(replay.policy.name)
        cells = [
            replay.policy.name,
            f"{replay.groups_per_hour:.1f}",
            _ratio(replay.groups_per_hour, base["sync"]),
            _ratio(replay.groups_per_hour, base["one_step_off"]),
            _percent(replay.busy["trainer"]),
            _percent(replay.trainer_idle),
            _percent(bound.share_start_order) if bound else "",
            _percent(bound.share_any_order) if bound else "",
            _percent(bound.share_reachable) if bound else "",
            _percent(replay.busy["engines"]),
            _percent(replay.busy["desktops"]),
            str(max(replay.lag_tokens, default=0)),
            _lags(replay),
            f"{replay.lost_tokens / max(1, replay.sampled_tokens):.2%}",
            f"{replay.masked_tokens / max(1, replay.sampled_tokens):.2%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _bias(replays), "", _costs(replays)])


GOALS = {"sync": 1.9, "one_step_off": 1.3}
BASELINES = {"sync": "synchronous", "one_step_off": "one step off, whole-rollout barrier"}


def _bias(replays: Sequence[Replay]) -> str:
    lines = [
        "| schedule | success trained / admitted | episode s trained / admitted | KS groups: D, p | KS episodes: D, p |",
        "|---|---|---|---|---|",
    ]
    for replay in replays:
        scenario = replay.scenario
        admitted = [e for group in replay.admitted for e in valid_attempts(group, scenario)]
        token_s, read_s = scenario.site.decode_s, 1 / scenario.site.prefill_tokens_per_s
        spans = [[e.span_s(token_s, read_s) for e in some] for some in (replay.trained_episodes, admitted)]
        groups = [_spans(some, scenario) for some in (replay.trained, replay.admitted)]
        cells = [
            replay.policy.name,
            f"{_mean_reward(replay.trained_episodes):.3f} / {_mean_reward(admitted):.3f}",
            f"{sum(spans[0]) / len(spans[0]):.0f} / {sum(spans[1]) / len(spans[1]):.0f}",
            "{:.3f}, {:.2f}".format(*ks_test(*groups)),
            "{:.3f}, {:.2f}".format(*ks_test(*spans)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _costs(replays: Sequence[Replay]) -> str:
    lines = [
        "| schedule | hours played | scheduler CPU, % of a core per 1,000 desktops | with worker and replay | admitted, dropped, stale |",
        "|---|---|---|---|---|",
    ]
    for replay in replays:
        per = replay.seconds * replay.scenario.site.num_desktops / 1000
        counts = replay.counts
        cells = [
            replay.policy.name,
            f"{replay.seconds / 3600:.1f}",
            f"{replay.scheduler_cpu_s / per:.4%}",
            f"{replay.process_cpu_s / per:.2%}",
            f"{counts['num_admitted']}, {counts['num_dropped']}, {counts['num_stale']}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def goals(replays: Sequence[Replay], bounds: dict[str, IdleBound]) -> str:
    """The project's goals for lag 1 against what was measured, met or not."""
    found = {replay.policy.name: replay for replay in replays}
    others = [(label, found.get(label), GOALS[name]) for name, label in BASELINES.items()]
    lines = []
    for replay in replays:
        if (
            replay.policy.max_lag != 1
            or not replay.policy.has_no_discard
            or replay.policy.name in BASELINES.values()
            or replay.policy.foresight
        ):
            continue
        trained, admitted = (_spans(some, replay.scenario) for some in (replay.trained, replay.admitted))
        is_short = max(admitted) < replay.scenario.site.step_s
        options = replay.policy.options.model_dump(exclude_defaults=True)
        keys = ", ".join(f"rollout.scheduler.{key} = {value}" for key, value in options.items())
        lines.append(f"{replay.policy.name}{f' ({keys})' if keys else ''}:")
        for label, other, factor in others:
            if other is not None and not is_short:
                ratio = replay.groups_per_hour / other.groups_per_hour
                lines.append(_goal(ratio >= factor, f"{ratio:.2f}x the groups/h of {label} (goal {factor}x)"))
        lag = max(replay.lag_tokens, default=0)
        lost, p_value = replay.lost_tokens / max(1, replay.sampled_tokens), ks_test(trained, admitted)[1]
        lines += [
            _goal(lag <= 1, f"greatest lag {lag} (goal 1)"),
            _goal(lost < 0.01, f"{lost:.2%} thrown away (goal under 1 %)"),
            _goal(p_value > 0.05, f"KS test of trained against admitted groups p = {p_value:.2f}"),
        ]
        for whose, least in _least(replay, bounds.get(replay.policy.name), replays):
            gap = 100 * (replay.trainer_idle - least)
            lines.append(_goal(gap <= 5, f"trainer waits {gap:+.1f} points more than {whose} (goal 5)"))
        if is_short:
            waits = f"trainer waits {replay.trainer_idle:.1%}; every episode is shorter than a step (goal under 5 %)"
            lines.append(_goal(replay.trainer_idle < 0.05, waits))
    return "\n".join(lines)


def _least(replay: Replay, bound: IdleBound | None, replays: Sequence[Replay]) -> list[tuple[str, float]]:
    if bound is None:
        return []
    least = [
        ("the least of any schedule, foresight included", bound.share_any_order),
        ("the least in the same start order", bound.share_start_order),
    ]
    tasks = [r.trainer_idle for r in replays if r.policy.foresight == "tasks"]
    if tasks:
        least.append(("the schedule that knows every task's mean and holds back most", min(tasks)))
    return least


def _goal(is_met: bool, text: str) -> str:
    return f"  {'met    ' if is_met else 'NOT MET'} {text}"


def _spans(groups: Sequence[GroupTrace], scenario: ScenarioConfig) -> list[float]:
    return [nominal_s(group, scenario) for group in groups]


def _mean_reward(episodes: Sequence[object]) -> float:
    rewards = [getattr(episode, "reward", None) or 0.0 for episode in episodes]
    return sum(rewards) / len(rewards)


def _lags(replay: Replay) -> str:
    total = max(1, sum(replay.lag_tokens.values()))
    ages = range(max(replay.lag_tokens, default=0) + 1)
    shares = [replay.lag_tokens.get(age, 0) / total for age in ages]
    return " ".join(f"{share:.2f}" for share in shares[:10]) + (" ..." if len(shares) > 10 else "")


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float, base: float | None) -> str:
    return f"{value / base:.2f}" if base else ""


def _percent(value: float) -> str:
    return f"{value:.1%}"
