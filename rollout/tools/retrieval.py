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
    documents = [words_of(f"{tool.name} {tool.description}") or ["tool"] for tool in tools]
    scores = BM25Okapi(documents).get_scores(words_of(query))
    best = sorted(range(len(tools)), key=lambda index: (-scores[index], index))
    return [tools[index] for index in best[:max_tools]]


def words_of(text: str) -> list[str]:
    """The words that retrieval compares: lower case, parts of camelCase names apart."""
    return _WORD.findall(re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())
