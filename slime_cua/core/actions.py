"""What a policy can do: one typed union. Parsers produce it, prompts and schemas are generated from the same names.

Positions are in the model's space (see coordinates.Point); the sandbox client converts once, when it sends.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slime_cua.core.coordinates import Point

GuiKind = Literal[
    "key",
    "type",
    "mouse_move",
    "left_click",
    "left_click_drag",
    "right_click",
    "middle_click",
    "double_click",
    "triple_click",
    "scroll",
    "hscroll",
    "wait",
    "screenshot",
]
SkillRoute = Literal["DIRECT", "QUERY_TEXT", "QUERY_IMAGE", "QUERY_BOTH"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GuiAction(_Frozen):
    """One GUI primitive, e.g. GuiAction(kind="left_click", point=Point(x=500, y=250))."""

    type: Literal["gui"] = "gui"
    kind: GuiKind
    point: Point | None = None
    """Where; needed by clicks, moves, drags (their end); optional for scrolls."""
    text: str | None = None
    """For `type`: what to type. Unicode; a line break is Return."""
    keys: tuple[str, ...] = ()
    """For `key`: pressed together, e.g. ("ctrl", "s"). Clicks: held down during the click."""
    scroll_clicks: int = 0
    """For scrolls: wheel clicks, positive is up (scroll) or right (hscroll)."""
    time_s: float = 0.0
    """For `wait`."""


class CodeAction(_Frozen):
    """A program run in a fresh process on the desktop; stdout and stderr come back as text."""

    type: Literal["code"] = "code"
    language: Literal["python", "bash"]
    code: str


class McpAction(_Frozen):
    """A call of an MCP tool."""

    type: Literal["mcp"] = "mcp"
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class SkillAction(_Frozen):
    """A look into the skill library (MMSkill-RL); no effect on the desktop."""

    type: Literal["skill"] = "skill"
    route: SkillRoute
    query: str = ""


class TerminateAction(_Frozen):
    """The policy says it is finished. `failure` also means: the task cannot be done."""

    type: Literal["terminate"] = "terminate"
    status: Literal["success", "failure"]
    answer: str = ""


Action = Annotated[
    GuiAction | CodeAction | McpAction | SkillAction | TerminateAction, Field(discriminator="type")
]
