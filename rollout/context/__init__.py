"""Context policies: which screenshots of the history are in view, and when a segment closes for it."""

from rollout.context.base import ContextPolicy, Seen, View, next_view
from rollout.context.policies import (
    Composed,
    LastImages,
    SkipOnMcpSuccess,
    SkipOnNoChange,
    SlidingWindow,
    context_policy,
)

__all__ = [
    "Composed",
    "ContextPolicy",
    "LastImages",
    "Seen",
    "SkipOnMcpSuccess",
    "SkipOnNoChange",
    "SlidingWindow",
    "View",
    "context_policy",
    "next_view",
]
