"""Schemas and prompts say what the parser keeps."""

import json

import pytest

from rollout.actions import ActionSpace, McpTool, parse, system_prompt, tool_schemas
from slime_cua.config.rollout import ActionSpaceConfig
from slime_cua.core.errors import ActionParseError

OS_HELIX_ACTIONS = [
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click"),
    *("double_click", "triple_click", "scroll", "hscroll", "wait", "terminate", "code"),
]
OS_HELIX_FIELDS = ["action", "keys", "text", "coordinate", "pixels", "time", "status", "execute_code", "language"]  # fmt: skip
EXAMPLE_VALUES = {
    "keys": ["ctrl"],
    "text": "a",
    "coordinate": [1, 2],
    "pixels": 3,
    "time": 1,
    "status": "success",
    "execute_code": "1",
    "language": "python",
}


def test_the_schema_has_the_names_of_os_helix_in_its_order() -> None:
    (tool,) = tool_schemas(ActionSpace())
    function = tool["function"]
    assert function["name"] == "custom_computer_use"
    assert function["parameters"]["required"] == ["action"]
    assert list(function["parameters"]["properties"]) == OS_HELIX_FIELDS
    assert function["parameters"]["properties"]["action"]["enum"] == OS_HELIX_ACTIONS


@pytest.mark.parametrize("os", ["ubuntu", "windows"])
@pytest.mark.parametrize("actions", [("gui",), ("code",), ("gui", "code")])
def test_every_action_of_the_schema_is_accepted_and_no_other(actions: tuple, os: str) -> None:
    space = ActionSpace(actions=actions, os=os)
    offered = tool_schemas(space)[0]["function"]["parameters"]["properties"]["action"]["enum"]
    for action in OS_HELIX_ACTIONS:
        accepted = False
        for fields in (
            [],
            ["keys"],
            ["text"],
            ["coordinate"],
            ["pixels"],
            ["status"],
            ["execute_code", "language"],
        ):
            arguments = {"action": action, **{name: EXAMPLE_VALUES[name] for name in fields}}
            text = json.dumps({"name": "custom_computer_use", "arguments": arguments})
            try:
                parse(f"<tool_call>{text}</tool_call>", space=space)
                accepted = True
            except ActionParseError:
                continue
        assert accepted == (action in offered), action


def test_a_windows_space_offers_python_only() -> None:
    space = ActionSpace.from_config(ActionSpaceConfig(os="windows"))
    assert tool_schemas(space)[0]["function"]["parameters"]["properties"]["language"]["enum"] == ["python"]
    assert "no Bash" in system_prompt(space)


def test_a_gui_space_shows_no_word_of_code() -> None:
    space = ActionSpace(actions=("gui",))
    shown = json.dumps(tool_schemas(space)) + system_prompt(space)
    assert "code" not in shown and "bash" not in shown


def test_tools_are_offered_beside_the_computer_tool() -> None:
    tool = McpTool("weather", "Tell the weather.", {"type": "object", "properties": {}})
    names = [
        tool["function"]["name"]
        for tool in tool_schemas(ActionSpace(("gui", "mcp", "skill"), mcp_tools=(tool,)))
    ]
    assert names == ["custom_computer_use", "skill_library", "weather"]


def test_the_short_prompt_names_the_groups() -> None:
    assert system_prompt(ActionSpace(), "short") == "computer: gui, code"
