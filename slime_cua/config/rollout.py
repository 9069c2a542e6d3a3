"""Engines, context, action space, episodes, admission."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
    start_timeout_s: float = 300.0
    request_timeout_s: float = 600.0


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


class RendererConfig(ConfigModel):
    prompt: Literal["full", "short"] = "full"
    """System prompt: OS-Helix' with the tool schemas, or a few tokens for a policy that knows its tools by heart."""
    observation_role: Literal["auto", "tool", "user"] = "auto"
    """Who says an observation; auto: a tool, where the model's template knows tool responses."""
    enable_thinking: bool | None = None
    """Passed to the chat template; None leaves the template's own default."""


class RolloutConfig(ConfigModel):
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    context: ContextConfig = ContextConfig()
    action_space: ActionSpaceConfig = ActionSpaceConfig()
    renderer: RendererConfig = RendererConfig()
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
