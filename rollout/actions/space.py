"""What a policy may do in a run: groups of actions, the system they act on, the tools it is offered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slime_cua.config.rollout import ActionSpaceConfig

Group = Literal["gui", "code", "mcp", "skill"]
Family = Literal["qwen_json", "qwen_xml"]
COMPUTER_TOOL = "custom_computer_use"
SKILL_TOOL = "skill_library"


@dataclass(frozen=True)
class McpTool:
    """An MCP tool that is offered: its name, what it does, and the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})


@dataclass(frozen=True)
class ActionSpace:
    """Which actions are offered and accepted. `terminate` always is; a Windows space has no Bash.

    Example: ActionSpace(actions=("gui", "code"), os="ubuntu")
    """

    actions: tuple[Group, ...] = ("gui", "code")
    os: Literal["ubuntu", "windows"] = "ubuntu"
    family: Family = "qwen_json"
    """How the model writes calls."""
    mcp_tools: tuple[McpTool, ...] = ()
    max_calls: int = 1
    """Tool calls that one response may hold."""
    computer_tools: tuple[str, ...] = (COMPUTER_TOOL,)
    """Function names that mean the computer tool; the first is the one that is offered."""

    @classmethod
    def from_config(cls, config: ActionSpaceConfig, mcp_tools: Sequence[McpTool] = ()) -> ActionSpace:
        """The space of a run's config, with the MCP tools that its desktops serve."""
        return cls(actions=config.actions, os=config.os, family=config.family, mcp_tools=tuple(mcp_tools))

    @property
    def languages(self) -> tuple[str, ...]:
        return ("python",) if self.os == "windows" else ("python", "bash")

    def mcp_tool(self, name: str) -> McpTool | None:
        """The offered tool of that name, if there is one."""
        if "mcp" not in self.actions:
            return None
        return next((tool for tool in self.mcp_tools if tool.name == name), None)


EVERYTHING = ActionSpace(actions=("gui", "code", "skill"), computer_tools=(COMPUTER_TOOL, "computer_use"))
"""Used when a caller names no space: every action of ours, under our tool's name or Qwen's."""
