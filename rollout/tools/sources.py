"""Where the tools of an episode's desktop come from: `action_space.mcp_server` of the config."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import Any, Protocol, cast

from rollout.tools.toolbox import McpToolbox, OsworldToolbox, Toolbox
from sandbox_cluster.api import ExecuteReply
from slime_cua.config.rollout import ActionSpaceConfig
from slime_cua.core.actions import CodeAction
from slime_cua.core.errors import ConfigError

OSWORLD = "osworld"


class _Runs(Protocol):
    """The part of a desktop that OSWorld-MCP's client needs."""

    async def execute(self, action: CodeAction, action_id: str) -> ExecuteReply: ...


class ToolSource(Protocol):
    """Gives each episode the tools of its desktop."""

    def open(self, desktop: _Runs, episode_id: str) -> AbstractAsyncContextManager[Toolbox]:
        """The toolbox until the block ends. Raises SandboxError when it cannot be reached."""
        ...


class ServerTools:
    """One MCP server for all desktops: tools that act outside of them."""

    def __init__(self, server: Any, timeout_s: float) -> None:
        """server: a URL, or whatever else mcp.Client takes."""
        self._server, self._timeout_s = server, timeout_s

    @asynccontextmanager
    async def open(self, desktop: _Runs, episode_id: str) -> AsyncIterator[Toolbox]:
        async with McpToolbox(self._server, self._timeout_s) as toolbox:
            yield toolbox


class OsworldTools:
    """OSWorld-MCP's tools inside each desktop. Every program that calls one has an action id of its own (I7)."""

    @asynccontextmanager
    async def open(self, desktop: _Runs, episode_id: str) -> AsyncIterator[Toolbox]:
        serial = count()

        async def execute(action: CodeAction) -> ExecuteReply:
            return await desktop.execute(action, f"{episode_id}-mcp{next(serial)}")

        yield OsworldToolbox(execute)


def tool_source(config: ActionSpaceConfig) -> ToolSource | None:
    """The source that the config names; None where the space offers no MCP tools.

    `module:Name` is called with the config. Raises ConfigError naming what is known.
    """
    if "mcp" not in config.actions:
        return None
    name = config.mcp_server
    if name == OSWORLD:
        return OsworldTools()
    if name.startswith(("http://", "https://")):
        return ServerTools(name, config.tool_timeout_s)
    return cast(ToolSource, named(name, "action_space.mcp_server", f"{OSWORLD}, a URL")(config))


def named(name: str, key: str, known: str) -> Any:
    """The object that `module:Name` names. Raises ConfigError with the key and what else is known."""
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"{key} = {name!r}: known are {known}, or module:Name of your own")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} = {name!r}: {error}") from error
