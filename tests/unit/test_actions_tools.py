"""MCP tools: listing, calling, and what a result says of itself."""

import contextlib
import io
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from rollout.actions import McpTool
from rollout.tools import McpToolbox, OsworldToolbox, retrieve, tool_result
from sandbox_cluster.api import ExecuteReply
from slime_cua.core.actions import CodeAction, McpAction
from slime_cua.core.errors import SandboxError, UnknownOutcomeError

TOOLS = [
    McpTool("calc.hide_row", "Hide a row of the sheet."),
    McpTool("impress.addSlide", "Add a slide."),
    McpTool("calc.sum", "Sum cells of a sheet."),
]


def test_the_tools_that_fit_the_task_come_first() -> None:
    assert [tool.name for tool in retrieve(TOOLS, "add one slide at the end", 1)] == ["impress.addSlide"]
    assert len(retrieve(TOOLS, "nothing in common", 2)) == 2
    assert retrieve([], "x") == []


@pytest.mark.parametrize(
    ("text", "is_error", "structured", "is_success", "num_effects"),
    [
        ("done", False, None, True, None),
        ("0 replacements made", False, None, False, 0),
        ("Hid 3 rows", False, None, True, 3),
        ("done", False, {"num_changes": 0}, False, 0),
        ("no such sheet", True, None, False, None),
        ("done", False, {"changed": True}, True, None),
    ],
)
def test_a_tool_that_changed_nothing_did_not_succeed(
    text: str, is_error: bool, structured: dict | None, is_success: bool, num_effects: int | None
) -> None:
    result = tool_result(text, is_error, structured)
    assert (result.is_success, result.num_effects) == (is_success, num_effects)


def test_a_long_result_is_cut_with_a_mark() -> None:
    text = tool_result("x" * 5000, is_error=False).text
    assert len(text) == 1500 and text.endswith("[cut]")
    idle = tool_result("0 rows " + "x" * 5000, is_error=False).text
    assert len(idle) == 1500 and idle.endswith("[nothing was changed]")


async def test_a_server_lists_and_runs_its_tools_and_tells_its_errors() -> None:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("desk")

    @server.tool()
    def hide(row: int) -> str:
        """Hide a row."""
        if row < 0:
            raise ValueError("no such row")
        return f"hid {row} rows"

    async with McpToolbox(server) as toolbox:
        (tool,) = await toolbox.tools()
        assert (tool.name, tool.description) == ("hide", "Hide a row.")
        assert tool.parameters["required"] == ["row"]
        done = await toolbox.call(McpAction(name="hide", arguments={"row": 2}))
        assert done.is_success and done.num_effects == 2
        failed = await toolbox.call(McpAction(name="hide", arguments={"row": -1}))
        assert not failed.is_success and "hide" in failed.text
        assert not (await toolbox.call(McpAction(name="nothing"))).is_success


async def test_a_server_that_is_not_there_is_an_infrastructure_failure() -> None:
    with pytest.raises(SandboxError):
        async with McpToolbox("http://127.0.0.1:9/mcp", timeout_s=5.0):
            pass


class Client:
    """What OSWorld-MCP installs inside its image."""

    calls: list[tuple[str, Any]] = []

    @staticmethod
    def list_tools(tool_name: str | None) -> list[dict[str, Any]]:
        print("connecting ...")
        return [
            {"name": "calc.sum", "description": "Sum.", "parameters": {"type": "object", "properties": {}}}
        ]

    @staticmethod
    def call_tool(name: str, params: dict[str, Any]) -> Any:
        Client.calls.append((name, params))
        if params.get("fails"):
            return {"success": False, "result": None, "error_message": "no sheet"}
        return "5 cells"


@pytest.fixture
def guest() -> Iterator[None]:
    module = types.ModuleType("osworld_mcp_client")
    module.OsworldMcpClient = Client  # type: ignore[attr-defined]
    sys.modules["osworld_mcp_client"] = module
    yield
    del sys.modules["osworld_mcp_client"]


async def run_here(action: CodeAction) -> ExecuteReply:
    """The program of a code action, run in this process."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(action.code, "<guest>", "exec"), {})
    except Exception as error:
        return ExecuteReply(stdout=printed.getvalue(), stderr=repr(error), returncode=1)
    return ExecuteReply(stdout=printed.getvalue(), stderr="", returncode=0)


@pytest.mark.usefixtures("guest")
async def test_osworlds_tools_are_called_with_their_arguments_unchanged() -> None:
    toolbox = OsworldToolbox(run_here)
    assert [tool.name for tool in await toolbox.tools()] == ["calc.sum"]
    arguments = {"range": "A1:B2", "text": "quote ' \" \\ \n {}", "flag": None, "deep": [True, 1.5]}
    result = await toolbox.call(McpAction(name="calc.sum", arguments=arguments))
    assert Client.calls[-1] == ("calc.sum", arguments)
    assert result.is_success and result.num_effects == 5
    failed = await toolbox.call(McpAction(name="calc.sum", arguments={"fails": True}))
    assert not failed.is_success and failed.text == "no sheet"


async def test_a_desktop_without_the_client_and_a_lost_reply_are_told_apart() -> None:
    with pytest.raises(SandboxError, match="osworld_mcp_client"):
        await OsworldToolbox(run_here).tools()

    async def lost(action: CodeAction) -> ExecuteReply:
        return ExecuteReply(stdout="", stderr="", returncode=None, is_timeout=True)

    with pytest.raises(UnknownOutcomeError):
        await OsworldToolbox(lost).call(McpAction(name="calc.sum"))
