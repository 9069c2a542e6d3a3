"""Engines, context, action space, episodes, admission."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from slime_cua.config.base import ConfigModel


class EngineConfig(ConfigModel):
    kind: Literal["embedded", "sglang", "external"] = "sglang"
    urls: tuple[str, ...] = ()
    """For `external`."""
    num_engines: int = Field(1, ge=1)
    tp: int = Field(1, ge=1)
    python: str = ""
    """Interpreter of the SGLang environment; empty: ours."""
    extra_args: tuple[str, ...] = ()
    dtype: Literal["fp32", "bf16"] = "bf16"
    max_batch: int = Field(64, ge=1)
    max_context_tokens: int = Field(32768, ge=64)
    num_threads: int = 1
    records_routing: bool = False
    """Mixture of experts: each reply carries the experts of every token, and training replays them (trainer.moe)."""
    start_timeout_s: float = 300.0
    request_timeout_s: float = 600.0

    @model_validator(mode="after")
    def _urls_and_arguments_fit_the_kind(self) -> EngineConfig:
        if (self.kind == "external") != bool(self.urls):
            raise ValueError("kind = external needs urls, and urls need kind = external")
        if self.kind == "sglang" and "--enable-deterministic-inference" in self.extra_args:
            raise ValueError(
                "extra_args: --enable-deterministic-inference gives every request without a seed the same one: all "
                "episodes of a group would be alike; take it out"
            )
        return self


class SamplingConfig(ConfigModel):
    temperature: float = Field(0.5, gt=0)
    max_response_tokens: int = Field(10240, ge=1)
    stop: tuple[str, ...] = ()


class ContextConfig(ConfigModel):
    name: str = "sliding_window"
    """sliding_window, last_images, skip_on_mcp_success, skip_on_no_change, several joined by "+", or `module:Name`."""
    max_images: int = Field(10, ge=1)
    retain: int = Field(5, ge=1)


class ActionSpaceConfig(ConfigModel):
    actions: tuple[Literal["gui", "code", "mcp", "skill"], ...] = ("gui", "code")
    os: Literal["ubuntu", "windows"] = "ubuntu"
    family: Literal["qwen_json", "qwen_xml"] = "qwen_json"
    mcp_server: str = ""
    """For `mcp`: osworld (OSWorld-MCP's client inside each desktop), the URL of a server, or `module:Name`."""
    max_mcp_tools: int = Field(18, ge=1)
    """Offered a task; where more are served, those that fit its instruction best."""
    tool_timeout_s: float = Field(75.0, gt=0)
    """Of listing the tools, and of a call."""
    skill_library: str = ""
    """For `skill`: a folder with skills.jsonl, or `module:Name`."""

    @model_validator(mode="after")
    def _what_is_offered_is_connected(self) -> ActionSpaceConfig:
        for action, key in (("mcp", "mcp_server"), ("skill", "skill_library")):
            if (action in self.actions) != bool(getattr(self, key)):
                raise ValueError(f"actions with {action!r} need {key}, and {key} needs {action!r} in actions")
        return self


class RendererConfig(ConfigModel):
    prompt: Literal["full", "short"] = "full"
    """System prompt: OS-Helix' with the tool schemas, or a few tokens for a policy that knows its tools by heart."""
    observation_role: Literal["auto", "tool", "user"] = "auto"
    """Who says an observation; auto: a tool, where the model's template knows tool responses."""
    enable_thinking: bool | None = None
    """Passed to the chat template; None leaves the template's own default."""


class SchedulerConfig(ConfigModel):
    """What happens at the edges of the lag bound. The defaults throw nothing away and bias nothing; docs/pipeline.md."""

    stale: Literal["wait", "mask", "drop"] = "wait"
    """Groups that would get too old for any later step: the step waits for them; or it does not, and their too-old
    turns are not trained; or it does not, and they are dropped (both are counted, both favour short tasks)."""
    max_task_drops: int = Field(1, ge=0)
    """For `drop`: a task that lost so many groups in a row to their age is waited for the next time."""
    max_task_failures: int = Field(3, ge=0)
    """A task is drawn no more once so many of its groups in a row had no two valid episodes; 0: it always is."""
    num_extra_groups: int = Field(0, ge=0)
    """Groups admitted beyond the lag bound; needs `mask` or `drop`, which take what then comes too late."""
    is_long_first: bool = True
    """Of tasks drawn together those start first whose groups took longest so far."""
    num_ahead_groups: int = Field(0, ge=0)
    """Tasks drawn ahead and held back, so that tasks of like duration run together and fewer steps wait for a long one.
    They start longest to shortest, then from the longest again: each after two such rounds at the latest. The sampler
    chooses them so much earlier, and a step's groups resemble each other in duration. Where episodes last longer than a
    step, 8 x groups_per_step is recommended (docs/pipeline.md)."""
    filters_flat_groups: bool = False
    """Groups whose valid episodes all scored the same are not trained; others are admitted in their place."""
    max_filtered_per_step: int = Field(16, ge=0)
    """So many flat groups are filtered between two steps; more are trained, so that a step always comes."""
    num_extra_episodes: int = Field(0, ge=0)
    """Over-sampling: attempts beyond episodes_per_group; the group closes when enough valid ones are in."""
    close_factor: float = Field(0.0, ge=0)
    """Early close: once half of a group's attempts are valid, the rest has until close_factor times their median
    duration; 0: all the time it needs."""

    @model_validator(mode="after")
    def _extra_groups_need_a_way_out(self) -> SchedulerConfig:
        if self.num_extra_groups and self.stale == "wait":
            raise ValueError(
                "num_extra_groups > 0 needs stale = mask or drop: with wait no group may be beyond the lag bound"
            )
        return self


class PublishConfig(ConfigModel):
    """How new weights come to the engines; docs/rollout.md."""

    way: Literal["broadcast", "ipc", "disk"] = "broadcast"
    """broadcast: NCCL from trainer rank 0 to every engine, on CPU gloo. ipc: one trainer rank and one SGLang engine share a
    GPU, and the engine maps the trainer's memory. disk: a checkpoint folder in run_dir, which every engine must see."""
    bucket_mb: int = Field(512, ge=1)
    """Size of what travels at once, for broadcast and ipc."""
    num_kept: int = Field(2, ge=1)
    """Versions that stay in run_dir, for disk. Restarted engines read the newest."""


class CanaryConfig(ConfigModel):
    """Engines compared with the trainer on fixed prompts; beyond the tolerance the run stops (slime_cua.launch.canary)."""

    every: int = Field(50, ge=0)
    """Updates between two checks; the first is before the first episode. 0: never."""
    num_prompts: int = Field(16, ge=1)
    """Of each kind: text alone, and places on a screen."""
    max_mean_gap: float = Field(0.05, gt=0)
    """Mean |log-prob engine - log-prob trainer| of either kind, nats. For bf16: twice what docs/rollout.md holds a run to."""
    max_p99_gap: float = Field(0.3, gt=0)


class RolloutConfig(ConfigModel):
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    context: ContextConfig = ContextConfig()
    action_space: ActionSpaceConfig = ActionSpaceConfig()
    renderer: RendererConfig = RendererConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    publish: PublishConfig = PublishConfig()
    canary: CanaryConfig = CanaryConfig()
    groups_per_step: int = Field(8, ge=1)
    episodes_per_group: int = Field(8, ge=1)
    max_turns: int = Field(50, ge=1)
    max_format_errors: int = Field(3, ge=1)
    """Consecutive responses without a valid action that end an episode."""
    max_policy_lag: int = Field(1, ge=0)
    max_infra_retries: int = Field(2, ge=0)
    """Replacement episodes a group may start for infrastructure failures."""
    episode_timeout_s: float = 3600.0
    turn_timeout_s: float = 600.0
    max_image_bytes: int = Field(16 << 30, ge=1 << 20)
    """Room for screenshots in the run directory. Beyond it those go that training has consumed, the oldest first."""
    call_timeout_s: float = Field(120.0, gt=0)
    """Deadline of the driver's short calls to the rollout side (not of playing episodes)."""
