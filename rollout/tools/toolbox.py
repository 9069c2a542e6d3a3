"""Where MCP tools are listed and called: a server by URL, or OSWorld's client inside a desktop."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from rollout.actions import McpTool
from rollout.tools.results import ToolResult, tool_result
from sandbox_cluster.api import ExecuteReply
from slime_cua.core.actions import CodeAction, McpAction
from slime_cua.core.errors import SandboxError, UnknownOutcomeError

log = logging.getLogger(__name__)
CLOSE_S = 5.0


class Toolbox(Protocol):
    """Tools of one desktop. An error of a tool is a result; a lost server raises SandboxError or UnknownOutcomeError."""

    async def tools(self) -> list[McpTool]:
        """What is served, in a fixed order."""
        ...

    async def call(self, action: McpAction) -> ToolResult:
        """Call once; a call whose reply is lost is never repeated (I7)."""
        ...


class McpToolbox:
    """Tools of an MCP server by streamable HTTP: `async with McpToolbox("http://host:9292/mcp") as toolbox`."""

    def __init__(self, server: Any, timeout_s: float = 75.0) -> None:
        """`server`: a URL, or whatever else mcp.Client takes."""
        self._server, self._timeout_s = server, timeout_s
        self._client: Any = None

    async def __aenter__(self) -> McpToolbox:
        from mcp import Client  # only runs with MCP tools need the SDK

        client = Client(self._server)
        try:
            async with asyncio.timeout(self._timeout_s):
                self._client = await client.__aenter__()
        except Exception as error:
            raise SandboxError(f"the MCP server at {self._server} does not answer: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close, in bounded time. The block's own error stays what it is: the SDK would wrap it in a group, which nobody
        who classifies failures could read."""
        client, self._client = self._client, None
        try:
            async with asyncio.timeout(CLOSE_S):
                await client.__aexit__(None, None, None)
        except Exception as error:
            log.warning("the connection to the MCP server at %s did not close: %r", self._server, error)

    async def tools(self) -> list[McpTool]:
        found: list[McpTool] = []
        cursor: str | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    page = await self._client.list_tools(cursor=cursor)
                    found += [
                        McpTool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools
                    ]
                    cursor = page.next_cursor
                    if not cursor:
                        return found
        except Exception as error:
            raise SandboxError(f"the MCP server at {self._server} lists no tools: {error}") from error

    async def call(self, action: McpAction) -> ToolResult:
        from mcp import MCPError

        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._client.call_tool(action.name, action.arguments)
        except MCPError as error:
            return tool_result(f"error: {error}", is_error=True)
        except Exception as error:
            raise UnknownOutcomeError(f"no reply of tool {action.name}: {error}") from error
        text = "\n".join(part.text for part in reply.content if getattr(part, "text", None))
        structured = reply.structured_content if isinstance(reply.structured_content, dict) else None
        return tool_result(text, bool(reply.is_error), structured)


Execute = Callable[[CodeAction], Awaitable[ExecuteReply]]
_BEGIN, _END = "<<mcp-json>>", "<<end>>"


class OsworldToolbox:
    """OSWorld-MCP's tools, through its client inside the desktop: each call is a short program run there.

    Source: OSWorld-MCP (OsworldMcpClient.list_tools and call_tool). Replies come back as JSON between marks, so what
    the client prints besides is ignored and nothing is evaluated.
    """

    def __init__(self, execute: Execute, app: str | None = None) -> None:
        """`execute` runs a code action on the leased desktop; `app` narrows the tools to an application."""
        self._execute, self._app = execute, app

    async def tools(self) -> list[McpTool]:
        listed = await self._run("OsworldMcpClient.list_tools(tool_name=given['app'])", {"app": self._app})
        if not isinstance(listed, list):
            raise SandboxError("OSWorld-MCP's client listed no tools: is its server up in this image?")
        return [
            McpTool(
                str(tool["name"]),
                str(tool.get("description") or ""),
                tool.get("parameters") or {"type": "object", "properties": {}},
            )
            for tool in listed
            if isinstance(tool, dict) and "name" in tool
        ]

    async def call(self, action: McpAction) -> ToolResult:
        given = {"name": action.name, "arguments": action.arguments}
        reply = await self._run(
            "OsworldMcpClient.call_tool(name=given['name'], params=given['arguments'])", given
        )
        if isinstance(reply, dict) and "success" in reply:
            text = reply.get("result") if reply["success"] else reply.get("error_message")
            return tool_result(str(text), is_error=not reply["success"], structured=reply)
        return tool_result(reply if isinstance(reply, str) else json.dumps(reply), is_error=False)

    async def _run(self, call: str, given: dict[str, Any]) -> Any:
        reply = await self._execute(CodeAction(language="python", code=_program(call, given)))
        if reply.is_timeout:
            raise UnknownOutcomeError("OSWorld-MCP's client did not come back in time")
        _, found, rest = reply.stdout.partition(_BEGIN)
        body, ended, _ = rest.partition(_END)
        if not (found and ended):
            raise SandboxError(f"OSWorld-MCP's client failed: {reply.stderr.strip()[-300:]}")
        try:
            return json.loads(body)
        except ValueError as error:
            raise SandboxError(f"OSWorld-MCP's client gave no JSON: {body[:100]}") from error


def _program(call: str, given: dict[str, Any]) -> str:
    """A program for the desktop; the arguments travel as a JSON string literal."""
    payload = json.dumps(json.dumps(given))
    return (
        "import json\n"
        "from osworld_mcp_client import OsworldMcpClient\n"
        f"given = json.loads({payload})\n"
        f"value = {call}\n"
        f"print({_BEGIN!r} + json.dumps(value, default=str) + {_END!r})\n"
    )
