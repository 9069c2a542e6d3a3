"""Tool and skill actions in the episode loop: the real parser, renderer, context policies and MCP SDK; desktop and policy are doubles."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
import types
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout.actions import ActionSpace, format_action
from rollout.context import SkipOnMcpSuccess
from rollout.episode import EpisodeRunner
from rollout.ports import Sampled
from rollout.renderer import Renderer
from rollout.tools import SkillFolder, Toolbox, ToolSource, skill_library, tool_source
from rollout.tools.sources import OsworldTools, ServerTools
from sandbox_cluster.api import EvaluateReply, ExecuteReply
from sandbox_cluster.client import Shot
from sandbox_cluster.guest.png import encode_solid
from slime_cua.config.rollout import ActionSpaceConfig, RolloutConfig
from slime_cua.core.actions import CodeAction, GuiAction, McpAction, SkillAction, TerminateAction
from slime_cua.core.errors import ConfigError
from slime_cua.core.types import Episode, ImageRef, Task
from slime_cua.data.images import ImageStore
from slime_cua.data.segments import build_segments

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny_base"
TASK = Task(id="t", instruction="hide row 2")
DONE = TerminateAction(status="success")


class Desktop:
    """Another colour at every look; runs Python in this process; writes down what reached it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_looks = 0

    async def setup(self, task: Task) -> object:
        return None

    async def screenshot(self) -> Shot:
        self.num_looks += 1
        return Shot(encode_solid((64, 32), (self.num_looks, 0, 0)), 64, 32, 1.0)

    async def step(self, actions: Sequence[GuiAction], action_id: str) -> Shot:
        self.calls.append(action_id)
        return await self.screenshot()

    async def execute(self, action: CodeAction, action_id: str) -> ExecuteReply:
        self.calls.append(action_id)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(action.code, "<guest>", "exec"), {})
        return ExecuteReply(stdout=printed.getvalue(), stderr="", returncode=0)

    async def evaluate(self, task: Task, last_action: str | None) -> EvaluateReply:
        return EvaluateReply(score=1.0)


class Policy:
    """Answers by script; keeps the prompts."""

    def __init__(self, renderer: Renderer, *answers: str) -> None:
        self._renderer, self._answers = renderer, list(answers)
        self.prompts: list[tuple[str, int]] = []

    async def generate(
        self, prompt_ids: Sequence[int], images: Sequence[tuple[ImageRef, bytes]], *, session: str
    ) -> Sampled:
        self.prompts.append((self._renderer.text_of_ids(prompt_ids), len(images)))
        ids = self._renderer.answer_ids(self._answers.pop(0))
        return Sampled(ids, (-1.0,) * len(ids), (0,) * len(ids), "stop")


def sheet() -> Any:
    """A server of the MCP SDK that hides rows; `hidden` is what it did."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("sheet")
    server.hidden = []

    @server.tool()
    def hide(row: int) -> str:
        """Hide a row."""
        if row < 0:
            raise ValueError("no such row")
        server.hidden.append(row)
        return f"hid {row} rows"

    return server


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(MODEL, ActionSpace(actions=("gui", "mcp", "skill")))


def call(name: str, **arguments: Any) -> str:
    return format_action(McpAction(name=name, arguments=arguments))


async def played(
    renderer: Renderer,
    folder: Path,
    answers: Sequence[str],
    *,
    tools: ToolSource | None = None,
    skills: SkillFolder | None = None,
    timeout_s: float = 5.0,
) -> tuple[Episode, Policy, Desktop]:
    space = ActionSpaceConfig(
        actions=("gui", "mcp", "skill"), mcp_server="osworld", skill_library="x", tool_timeout_s=timeout_s
    )
    runner = EpisodeRunner(
        RolloutConfig(action_space=space), renderer, SkipOnMcpSuccess(), ImageStore(folder), tools, skills
    )
    policy, desktop = Policy(renderer, *answers), Desktop()
    episode = await runner.run(TASK, desktop, policy, episode_id="e", group_id="g")
    return episode, policy, desktop


async def test_a_tool_is_called_once_and_its_result_and_the_screen_are_the_next_observation(
    renderer: Renderer, tmp_path: Path
) -> None:
    server = sheet()
    episode, policy, desktop = await played(
        renderer,
        tmp_path,
        [call("hide", row=-1), call("hide", row=2), format_action(DONE)],
        tools=ServerTools(server, 5.0),
    )
    assert episode.is_valid, episode.error
    assert server.hidden == [2] and desktop.calls == []
    assert [turn.step_type for turn in episode.turns] == ["mcp", "mcp", "terminate"]
    assert episode.turns[0].action == McpAction(name="hide", arguments={"row": -1})
    first, second, third = policy.prompts
    assert '"hide"' in first[0] and "Hide a row." in first[0]
    assert "hide" in second[0][len(first[0]) :] and second[1] == 2, "an error is told and the screen is shown"
    assert "hid 2 rows" in third[0] and third[1] == 2, (
        "after a success the text is enough (skip_on_mcp_success)"
    )
    (segment,) = build_segments(episode)
    assert segment.step_types == ("mcp", "mcp", "terminate")


async def test_a_tool_that_the_desktop_does_not_serve_is_a_format_error(
    renderer: Renderer, tmp_path: Path
) -> None:
    episode, _, _ = await played(
        renderer, tmp_path, [call("unhide", row=2), format_action(DONE)], tools=ServerTools(sheet(), 5.0)
    )
    assert [turn.format_error for turn in episode.turns] == ["unknown_tool", None]
    assert renderer.space.mcp_tools == (), "what one episode's desktop serves is not offered to the next"


class HungTools:
    """Lists the sheet's tools; calls never end."""

    def __init__(self) -> None:
        self.num_calls = 0

    @contextlib.asynccontextmanager
    async def open(self, desktop: Any, episode_id: str) -> AsyncIterator[Toolbox]:
        async with ServerTools(sheet(), 5.0).open(desktop, episode_id) as inner:

            async def hang(action: McpAction) -> Any:
                self.num_calls += 1
                await asyncio.Event().wait()

            yield types.SimpleNamespace(tools=inner.tools, call=hang)  # type: ignore[misc]


async def test_a_tool_that_does_not_answer_is_an_unknown_outcome_and_never_called_again(
    renderer: Renderer, tmp_path: Path
) -> None:
    tools = HungTools()
    episode, _, _ = await played(renderer, tmp_path, [call("hide", row=2)], tools=tools, timeout_s=0.2)
    assert not episode.is_valid and tools.num_calls == 1
    assert episode.error is not None and episode.error.startswith("UnknownOutcomeError: tool hide")
    assert "tool_timeout_s" in episode.error


async def test_a_server_that_is_gone_or_serves_nothing_makes_the_episode_invalid(
    renderer: Renderer, tmp_path: Path
) -> None:
    from mcp.server.mcpserver import MCPServer

    for server, said in (
        ("http://127.0.0.1:9/mcp", "does not answer"),
        (MCPServer("empty"), "serves no tool"),
    ):
        episode, policy, _ = await played(renderer, tmp_path, [], tools=ServerTools(server, 3.0))
        assert not episode.is_valid and policy.prompts == []
        assert episode.error is not None and said in episode.error


@pytest.fixture
def guest() -> Iterator[list[tuple[str, Any]]]:
    """OSWorld-MCP's client as its image has it; the calls that reached it."""
    calls: list[tuple[str, Any]] = []

    class Client:
        @staticmethod
        def list_tools(tool_name: str | None) -> list[dict[str, Any]]:
            return [{"name": "hide", "parameters": {"type": "object", "properties": {}}}]

        @staticmethod
        def call_tool(name: str, params: dict[str, Any]) -> Any:
            calls.append((name, params))
            return {"success": True, "result": "hid 1 row"}

    module = types.ModuleType("osworld_mcp_client")
    module.OsworldMcpClient = Client  # type: ignore[attr-defined]
    sys.modules["osworld_mcp_client"] = module
    yield calls
    del sys.modules["osworld_mcp_client"]


async def test_osworlds_tools_run_on_the_leased_desktop_each_call_under_an_id_of_its_own(
    renderer: Renderer, tmp_path: Path, guest: list[tuple[str, Any]]
) -> None:
    answers = [call("hide", row=2), call("hide", row=2), format_action(DONE)]
    episode, _, desktop = await played(renderer, tmp_path, answers, tools=OsworldTools())
    assert episode.is_valid, episode.error
    assert guest == [("hide", {"row": 2})] * 2
    assert desktop.calls == ["e-mcp0", "e-mcp1", "e-mcp2"]


def library(folder: Path) -> SkillFolder:
    (folder / "hide.png").write_bytes(encode_solid((32, 32), (0, 0, 9)))
    entries = [
        {"name": "hide a row", "text": "Right-click its number.", "image": "hide.png"},
        {"name": "print", "text": "Press ctrl and p."},
        {"name": "merge cells", "text": "Select them, then Format."},
        {"name": "freeze panes", "text": "View menu."},
    ]
    (folder / "skills.jsonl").write_text("\n".join(map(json.dumps, entries)))
    return SkillFolder(folder)


@pytest.mark.parametrize(
    ("route", "query", "text", "num_images"),
    [
        ("QUERY_BOTH", "how to hide a row", "hide a row: Right-click", 2),
        ("QUERY_TEXT", "how to hide a row", "hide a row: Right-click", 1),
        ("QUERY_IMAGE", "how to hide a row", "hide a row", 2),
        ("QUERY_IMAGE", "how to print", "[no skill fits]", 1),
        ("QUERY_BOTH", "xyzzy", "[no skill fits]", 1),
        ("DIRECT", "", "[nothing was looked up]", 1),
    ],
)
async def test_a_look_up_shows_what_its_route_asks_for_and_leaves_the_desktop_alone(
    route: Any, query: str, text: str, num_images: int, renderer: Renderer, tmp_path: Path
) -> None:
    answers = [format_action(SkillAction(route=route, query=query)), format_action(DONE)]
    episode, policy, desktop = await played(
        renderer, tmp_path / "images", answers, tools=ServerTools(sheet(), 5.0), skills=library(tmp_path)
    )
    assert episode.is_valid, episode.error
    assert text in policy.prompts[1][0] and policy.prompts[1][1] == num_images
    assert desktop.calls == [] and desktop.num_looks == 1
    assert ("Right-click" in policy.prompts[1][0]) == ("Right-click" in text)


@pytest.mark.parametrize(
    "line",
    [
        '{"name": "x"}',
        "[1]",
        '{"name": "x", "text": "y", "image": "no.png"}',
        '{"name": "x", "text": "y", "z": 1}',
        "",
    ],
)
def test_a_broken_library_is_refused_with_its_place(line: str, tmp_path: Path) -> None:
    (tmp_path / "skills.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=r"skills\.jsonl(, line 1| holds no skill)"):
        SkillFolder(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"actions": ("gui", "mcp")}, "need mcp_server"),
        ({"actions": ("gui", "skill")}, "need skill_library"),
        ({"actions": ("gui",), "mcp_server": "osworld"}, "needs 'mcp' in actions"),
    ],
)
def test_an_action_that_nothing_is_connected_for_is_refused_when_the_config_is_read(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ActionSpaceConfig(**options)


def test_tools_and_skills_come_by_the_names_of_the_config(tmp_path: Path) -> None:
    def config(server: str) -> ActionSpaceConfig:
        return ActionSpaceConfig(actions=("mcp",), mcp_server=server)

    assert tool_source(ActionSpaceConfig()) is None and skill_library(ActionSpaceConfig()) is None
    assert isinstance(tool_source(config("osworld")), OsworldTools)
    assert isinstance(tool_source(config("http://host/mcp")), ServerTools)
    for wrong in ("osword", "no.such.module:Name", "rollout.tools:Nothing"):
        with pytest.raises(ConfigError, match=r"action_space\.mcp_server"):
            tool_source(config(wrong))
    library(tmp_path)
    folder = ActionSpaceConfig(actions=("skill",), skill_library=str(tmp_path))
    assert isinstance(skill_library(folder), SkillFolder)
    with pytest.raises(ConfigError, match=r"action_space\.skill_library"):
        skill_library(folder.model_copy(update={"skill_library": str(tmp_path / "no")}))
