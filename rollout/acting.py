"""What a typed action does, and what the policy is shown of it: desktop, MCP tools, skill library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollout.actions import McpTool
from rollout.ports import DesktopPort
from rollout.tools import SkillLibrary, Toolbox, ToolSource, retrieve
from sandbox_cluster.api import ExecuteReply
from sandbox_cluster.client import Shot
from slime_cua.core.actions import CodeAction, GuiAction, McpAction, SkillAction
from slime_cua.core.errors import InfrastructureError, SandboxError, UnknownOutcomeError
from slime_cua.core.types import ImageRef, Observation
from slime_cua.data.images import ImageStore

Acting = GuiAction | CodeAction | McpAction | SkillAction


@dataclass(frozen=True)
class Outcome:
    """What came of an action."""

    observation: Observation
    is_success: bool | None = None
    """What a tool said of itself; None where no tool was called."""


@dataclass
class Hands:
    """Everything that one episode can act on. `images` keeps what is seen."""

    desktop: DesktopPort
    images: ImageStore
    toolbox: Toolbox | None = None
    skills: SkillLibrary | None = None
    tool_timeout_s: float = 75.0

    async def look(self) -> Observation:
        """The screen as it is."""
        return self._seen(await self.desktop.screenshot())

    async def tools(self, query: str, max_tools: int) -> tuple[McpTool, ...]:
        """The tools that are offered: all that are served, or the `max_tools` that fit `query` best. Raises SandboxError."""
        if self.toolbox is None:
            return ()
        try:
            async with asyncio.timeout(self.tool_timeout_s):
                served = await self.toolbox.tools()
        except TimeoutError:
            raise SandboxError(
                f"the tools were not listed within action_space.tool_timeout_s = {self.tool_timeout_s}"
            ) from None
        if not served:
            raise SandboxError("the tool server serves no tool: is this the right server or image?")
        return tuple(served if len(served) <= max_tools else retrieve(served, query, max_tools))

    async def act(self, action: Acting, action_id: str) -> Outcome:
        """Do it once. Raises InfrastructureError where something under the policy failed; a tool's own error is an outcome."""
        if isinstance(action, GuiAction):
            return Outcome(self._seen(await self.desktop.step([action], action_id)))
        if isinstance(action, CodeAction):
            reply = await self.desktop.execute(action, action_id)
            return Outcome(self._seen(await self.desktop.screenshot(), code_result(reply)))
        if isinstance(action, McpAction):
            return await self._call(action)
        return Outcome(await self._look_up(action))

    async def _call(self, action: McpAction) -> Outcome:
        if self.toolbox is None:
            raise InfrastructureError(f"tool {action.name} was called and no toolbox is connected")
        try:
            async with asyncio.timeout(self.tool_timeout_s):
                result = await self.toolbox.call(action)
        except TimeoutError:
            raise UnknownOutcomeError(
                f"tool {action.name} did not answer within action_space.tool_timeout_s = {self.tool_timeout_s}"
            ) from None
        return Outcome(self._seen(await self.desktop.screenshot(), result.text), result.is_success)

    async def _look_up(self, action: SkillAction) -> Observation:
        """Text, picture or both, as the route asks; the desktop is neither touched nor looked at."""
        if self.skills is None:
            raise InfrastructureError("the skill library was asked and none is connected")
        found = await asyncio.to_thread(self.skills.look_up, action)
        image = self.images.put(found.png) if found.png is not None else None
        return Observation(image=image, text=found.text)

    def _seen(self, shot: Shot, text: str | None = None) -> Observation:
        return Observation(image=self._keep(shot), text=text, time_s=shot.time_s)

    def _keep(self, shot: Shot) -> ImageRef:
        return self.images.put(shot.png, shot.width_px, shot.height_px)


@asynccontextmanager
async def hands_of(
    desktop: DesktopPort,
    images: ImageStore,
    *,
    episode_id: str,
    tools: ToolSource | None,
    skills: SkillLibrary | None,
    tool_timeout_s: float,
) -> AsyncIterator[Hands]:
    """The hands of one episode; its connection to the tools is closed at the end. Raises SandboxError when there is none."""
    hands = Hands(desktop, images, None, skills, tool_timeout_s)
    if tools is None:
        yield hands
        return
    async with tools.open(desktop, episode_id) as hands.toolbox:
        yield hands


def code_result(reply: ExecuteReply) -> str:
    """The text that the policy sees for a code action: what it printed, and how it ended if not well."""
    parts = [part.rstrip("\n") for part in (reply.stdout, reply.stderr) if part.strip()]
    if reply.is_timeout:
        parts.append("[timed out]")
    elif reply.returncode != 0:
        parts.append(f"[exit code {reply.returncode}]")
    if reply.is_truncated:
        parts.append("[output cut]")
    return "\n".join(parts) or "[no output]"
