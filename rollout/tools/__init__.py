"""MCP tools and skills: where they are listed and called, which are offered, and what their results say."""

from rollout.tools.results import ToolResult, cut_text, tool_result
from rollout.tools.retrieval import retrieve
from rollout.tools.skills import Found, SkillFolder, SkillLibrary, skill_library
from rollout.tools.sources import ToolSource, tool_source
from rollout.tools.toolbox import McpToolbox, OsworldToolbox, Toolbox

__all__ = [
    "Found",
    "McpToolbox",
    "OsworldToolbox",
    "SkillFolder",
    "SkillLibrary",
    "ToolResult",
    "ToolSource",
    "Toolbox",
    "cut_text",
    "retrieve",
    "skill_library",
    "tool_result",
    "tool_source",
]
