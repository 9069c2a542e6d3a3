"""What a replay plays: the site (desktops, engines, trainer) and how tasks behave. Every default says what it stands on."""

from __future__ import annotations

from pydantic import Field

from slime_cua.config.base import ConfigModel


class SiteConfig(ConfigModel):
    """The machines. Defaults: 16 training and 16 rollout GPUs, 128 desktops."""

    num_desktops: int = Field(128, ge=1)
    num_engines: int = Field(8, ge=1)
    """8 x TP2 on 16 GPUs."""
    max_batch: int = Field(64, ge=1)
    """Requests that one engine decodes at once; more wait."""
    decode_s: float = Field(0.012, gt=0)
    """Time of a decode step with one request. Assumed: 27B weights in bf16 read by two H200 take 5.6 ms, twice that seen."""
    decode_s_per_request: float = Field(0.00015, ge=0)
    """What each further request adds to a decode step. Assumed."""
    prefill_tokens_per_s: float = Field(12000.0, gt=0)
    """Assumed: 27B at about 320 TFLOP/s a GPU on two GPUs."""
    publish_s: float = Field(8.0, ge=0)
    """Engines are paused so long for new weights; then prompts are read again from their start. Assumed: 54 GB, 7 GB/s."""
    step_s: float = Field(265.0, gt=0)
    """Mean optimiser step over groups_per_step groups. Published: SCALE-CUA's step with segmentation."""
    step_token_share: float = Field(0.8, ge=0, le=1)
    """So much of step_s grows with the batch's tokens; 0 makes every step the same. Assumed."""


class TasksConfig(ConfigModel):
    """How long tasks take. Fitted to: episodes of 20 s to 40 min, at most 50 turns (given), and to the published gain in use of
    desktops of decoupled over synchronous collection, 5.5 (DART-GUI). What is not published is assumed and said so.

    Duration (first observation to last action) = exp(N(log median, task_sigma) + N(0, episode_sigma)), redrawn outside
    [min_s, max_s]: the task's part is the same for all its episodes. Turns = duration / turn time. Sampled tokens are
    log-normal; what a turn's sampling (on an idle engine) leaves of its time is the desktop's.
    """

    num_tasks: int = Field(512, ge=1)
    median_s: float = Field(240.0, gt=0)
    """Assumed."""
    task_sigma: float = Field(0.8, ge=0)
    """Assumed; with episode_sigma 4 % of episodes are longer than 20 minutes."""
    episode_sigma: float = Field(0.45, ge=0)
    """Assumed."""
    min_s: float = 20.0
    max_s: float = 2400.0
    turn_s: float = Field(14.0, gt=0)
    """Median time of a turn; log-normal over tasks with sigma 0.35. Assumed."""
    max_turns: int = Field(50, ge=1)
    response_tokens: float = Field(180.0, gt=0)
    """Median of a response, sigma 0.9, at most 10,240 (given). Assumed: between a 60-token GUI and a 600-token code step."""
    screenshot_tokens: int = 1222
    """Measured: 1504x832 in 32-px patches."""
    prompt_tokens: int = 1500
    """System prompt and tools. Assumed."""
    boot_s: float = Field(5.0, ge=0)
    """A desktop's time between two leases (revert, spare warm). Assumed; log-normal, sigma 0.3, as setup and judge."""
    setup_s: float = Field(8.0, ge=0)
    judge_s: float = Field(4.0, ge=0)
    failure_rate: float = Field(0.01, ge=0, lt=1)
    """Episodes that end by an infrastructure failure somewhere on their way. Assumed."""
    success_rate: float = Field(0.5, gt=0, lt=1)
    """Of a task of median duration; each doubling of the task's duration halves the odds. Assumed, so that bias shows."""


class ScenarioConfig(ConfigModel):
    """One comparison."""

    name: str = "long_tail"
    recorded: str = ""
    """Run directory or episodes JSONL whose episodes are played instead of generated ones."""
    num_steps: int = Field(100, ge=1)
    groups_per_step: int = Field(8, ge=1)
    episodes_per_group: int = Field(8, ge=2)
    max_infra_retries: int = Field(2, ge=0)
    seed: int = 0
    site: SiteConfig = SiteConfig()
    tasks: TasksConfig = TasksConfig()


def _short() -> ScenarioConfig:
    tasks = TasksConfig(median_s=120.0, task_sigma=0.4, episode_sigma=0.3, max_s=200.0)
    return ScenarioConfig(name="short", tasks=tasks)


def _large() -> ScenarioConfig:
    site = SiteConfig(num_desktops=4096, num_engines=512)
    return ScenarioConfig(
        name="large", num_steps=6, groups_per_step=256, site=site, tasks=TasksConfig(num_tasks=4096)
    )


PRESETS = {"long_tail": ScenarioConfig, "short": _short, "large": _large}
"""long_tail: 20 s to 40 min. short: the longest episode is shorter than one step. large: 4,096 desktops, 512 engines."""
