"""Which of many tools are offered for a task."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollout.actions import McpTool

MAX_TOOLS = 18
"""Source: hybrid-routing-agent offers the 18 best by BM25."""
_WORD = re.compile(r"[a-z]+|[0-9]+")


def retrieve(tools: Sequence[McpTool], query: str, max_tools: int = MAX_TOOLS) -> list[McpTool]:
    """The `max_tools` tools whose name and description fit `query` best by BM25, best first; ties keep their order."""
    from rank_bm25 import BM25Okapi

    if not tools:
        return []
    words = [_words(f"{tool.name} {tool.description}") or ["tool"] for tool in tools]
    scores = BM25Okapi(words).get_scores(_words(query))
    best = sorted(range(len(tools)), key=lambda index: (-scores[index], index))
    return [tools[index] for index in best[:max_tools]]


def _words(text: str) -> list[str]:
    return _WORD.findall(re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())
