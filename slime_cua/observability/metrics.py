"""The one table of metric names. The W&B dashboard, docs/metrics.md and the HTML report are built from it.

A name is an API: scripts and dashboards read it. `axis` says what a value belongs to: a training step, or a time.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Axis = Literal["step", "sft_step", "eval"]


@dataclass(frozen=True)
class Metric:
    name: str
    """May end in `*`: one value a family, action type or phase."""
    unit: str
    meaning: str
    axis: Axis = "step"
    is_headline: bool = False
    """Shown as a curve in the report."""


METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "score", "mean score of the valid episodes trained in the step", is_headline=True),
    Metric("reward/family/*", "score", "the same, by task family"),
    Metric("rollout/num_episodes", "count", "episodes in the step's groups"),
    Metric("rollout/num_invalid", "count", "of them without an honest score (infrastructure or judge)"),
    Metric("rollout/num_dropped_groups", "count", "groups dropped so far, for any reason"),
    Metric("rollout/num_stale_groups", "count", "of them for their age (scheduler.stale = drop)"),
    Metric("rollout/num_filtered_groups", "count", "of them because all episodes scored the same"),
    Metric("rollout/num_masked_groups", "count", "groups trained so far with turns masked for their age"),
    Metric(
        "rollout/num_quarantined_tasks", "count", "tasks drawn no more: their groups failed again and again"
    ),
    Metric("rollout/turns_mean", "turns", "turns an episode"),
    Metric(
        "rollout/code_action_rate", "share", "code actions among actions with an effect", is_headline=True
    ),
    Metric("rollout/action_rate/*", "share", "actions by type among all responses"),
    Metric("rollout/format_error_rate", "share", "responses that hold no valid action", is_headline=True),
    Metric("rollout/response_tokens_mean", "tokens", "sampled tokens a response"),
    Metric("rollout/zero_variance_share", "share", "groups whose valid episodes all scored the same"),
    Metric("lag/max", "versions", "greatest age of a trained token at the optimiser step", is_headline=True),
    Metric("lag/mean", "versions", "mean age of trained tokens"),
    Metric("lag/share/*", "share", "trained tokens by age"),
    Metric("lag/span_share", "share", "episodes whose tokens come from more than one version"),
    Metric("loss/policy", "-", "policy loss (global mean over samples)", is_headline=True),
    Metric("loss/grad_norm", "-", "gradient norm before clipping", is_headline=True),
    Metric(
        "loss/ratio_mean", "-", "mean importance ratio of the samples (token-level losses: of the tokens)"
    ),
    Metric("loss/clip_fraction", "share", "samples (token-level losses: tokens) whose ratio was clipped"),
    Metric("loss/clip_fraction/*", "share", "steps of a type that stand in clipped samples"),
    Metric("loss/step_share/*", "share", "gradient weight by action type"),
    Metric("loss/kl", "nats", "mean log-ratio old to new over trained tokens"),
    Metric("loss/entropy", "nats", "mean entropy of the policy on trained tokens", is_headline=True),
    Metric("loss/num_samples", "count", "segments in the step"),
    Metric("loss/num_trained_tokens", "tokens", "tokens with a gradient"),
    Metric("loss/padding_share", "share", "padding among packed tokens"),
    Metric("loss/num_microbatches", "count", "packed forwards of the step, over all ranks"),
    Metric("loss/num_packed_tokens", "tokens", "tokens of these forwards, images expanded"),
    Metric("loss/lr", "-", "learning rate of the step"),
    Metric("loss/policy_version", "versions", "version of the weights that the step started from"),
    Metric("loss/is_skipped", "0/1", "1 when the step had nothing to train and moved no weight"),
    Metric(
        "loss/old_from_engine_share",
        "share",
        "trained tokens whose sampling weights were lost in a restart, with pi_old = behaviour",
    ),
    Metric("moe/load_max", "-", "tokens of the busiest expert over the mean of its layer, mean over layers"),
    Metric("moe/idle_share", "share", "experts that no token of the step chose"),
    Metric("moe/replayed_share", "share", "choices of experts taken from the engine's record"),
    Metric("moe/replay_agreement", "share", "of them those that the trainer's router would have made, too"),
    Metric("gap/logp_abs_mean", "nats", "mean |log-prob engine - trainer| on tokens of the current version"),
    Metric("gap/logp_abs_p99", "nats", "99th percentile of the same"),
    Metric(
        "gap/logp_abs_mean/*",
        "nats",
        "the mean by action type, and for tokens after an image (image) or none (text)",
    ),
    Metric("gap/logp_abs_p99/*", "nats", "the percentile by the same kinds"),
    Metric(
        "canary/gap/*",
        "nats",
        "mean |log-prob engine - trainer| on fixed prompts: text, image; where checked",
    ),
    Metric("sampler/ema_mean", "score", "mean success estimate over the training tasks"),
    Metric("sampler/num_seen", "count", "tasks drawn at least once"),
    Metric("time/step_s", "s", "wall time of the whole step", is_headline=True),
    Metric("time/wait_s", "s", "of it waiting for finished groups"),
    Metric("time/train_s", "s", "of it in the trainer"),
    Metric("time/publish_s", "s", "of it sending weights to the engines (engines paused)"),
    Metric("time/save_s", "s", "of it saving a checkpoint"),
    Metric("busy/trainer", "share", "share of the step that the trainer worked"),
    Metric("busy/engine", "share", "share of the step that at least one request was decoding"),
    Metric("busy/desktops", "share", "mean share of desktops that were leased"),
    Metric("sft/loss", "nats", "mean negative log-likelihood of demonstrated tokens", "sft_step", True),
    Metric("sft/grad_norm", "-", "gradient norm before clipping", "sft_step"),
    Metric("sft/lr", "-", "learning rate of the step", "sft_step"),
    Metric("sft/num_samples", "count", "segments in the step", "sft_step"),
    Metric("sft/num_trained_tokens", "tokens", "tokens with a gradient", "sft_step"),
    Metric("sft/padding_share", "share", "padding among packed tokens", "sft_step"),
    Metric("sft/num_microbatches", "count", "packed forwards of the step, over all ranks", "sft_step"),
    Metric("sft/num_packed_tokens", "tokens", "tokens of these forwards, images expanded", "sft_step"),
    Metric("sft/moe_load_max", "-", "as moe/load_max", "sft_step"),
    Metric("sft/moe_idle_share", "share", "as moe/idle_share", "sft_step"),
    Metric(
        "sft/moe_replayed_share", "share", "as moe/replayed_share; demonstrations have no record", "sft_step"
    ),
    Metric("sft/is_skipped", "0/1", "1 when the step moved no weight", "sft_step"),
    Metric("eval/success", "share", "held-out success, families weighted equally", "eval", True),
    Metric("eval/success/*", "share", "held-out success by family", "eval"),
    Metric("eval/success_feasible", "share", "held-out success on tasks that can be done", "eval"),
    Metric("eval/success_infeasible", "share", "held-out success on tasks that cannot be done", "eval"),
    Metric("eval/give_up_rate", "share", "attempts at feasible tasks that ended in giving up (FAIL)", "eval"),
    Metric("eval/coverage", "share", "valid episodes among the declared ones", "eval"),
    Metric("eval/turns_mean", "turns", "turns an episode", "eval"),
    Metric("eval/code_action_rate", "share", "code actions among actions with an effect", "eval"),
    Metric("eval/format_error_rate", "share", "responses that hold no valid action", "eval"),
)
_EXACT = {metric.name: metric for metric in METRICS if not metric.name.endswith("*")}
_PATTERNS = [metric for metric in METRICS if metric.name.endswith("*")]


def find(name: str) -> Metric | None:
    """The table's row for `name`, or None."""
    return _EXACT.get(name) or next((m for m in _PATTERNS if fnmatch.fnmatch(name, m.name)), None)


def markdown_table() -> str:
    """docs/metrics.md is this."""
    rows = [f"| `{m.name}` | {m.unit} | {m.meaning} | {m.axis} |" for m in METRICS]
    return "\n".join(["| name | unit | meaning | axis |", "|---|---|---|---|", *rows]) + "\n"


def over_steps(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of several optimiser steps as one row: times and counts (`num_...`) summed, `.../max` the largest, else the mean."""
    row: dict[str, float] = {}
    for name in sorted({name for step in metrics for name in step}):
        values = [step[name] for step in metrics if name in step]
        last = name.rsplit("/", 1)[-1]
        if name.startswith("time/") or last.startswith("num_"):
            row[name] = sum(values)
        else:
            row[name] = max(values) if last == "max" else sum(values) / len(values)
    return row
