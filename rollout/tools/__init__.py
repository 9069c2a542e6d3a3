"""MCP tools: where they are listed and called, which are offered, and what their results say."""

from rollout.tools.results import ToolResult, cut_text, tool_result
from rollout.tools.retrieval import retrieve
from rollout.tools.toolbox import McpToolbox, OsworldToolbox, Toolbox

__all__ = ["McpToolbox", "OsworldToolbox", "ToolResult", "Toolbox", "cut_text", "retrieve", "tool_result"]
