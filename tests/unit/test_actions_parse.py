"""The strict parser: what it accepts, what it refuses and under which name."""

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout.actions import ActionSpace, McpTool, format_action, parse, parse_all, parse_lenient
from slime_cua.core.actions import CodeAction, GuiAction, McpAction, SkillAction, TerminateAction
from slime_cua.core.coordinates import Point
from slime_cua.core.errors import ActionParseError

WEATHER = McpTool(
    "weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
TOOLS = ActionSpace(actions=("gui", "code", "mcp", "skill"), mcp_tools=(WEATHER,))


def call(name: str = "custom_computer_use", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def code_of(text: str | bytes, family: str = "qwen_json", space: ActionSpace | None = None) -> str:
    with pytest.raises(ActionParseError) as caught:
        parse(text, family, space)
    return caught.value.code


def test_a_click_after_reasoning_and_before_the_end_of_turn_is_read() -> None:
    text = f"I press the button.\n{call(action='left_click', coordinate=[500, 250])}<|im_end|>"
    assert parse(text) == GuiAction(kind="left_click", point=Point(x=500, y=250))


@pytest.mark.parametrize(
    ("arguments", "action"),
    [
        ({"action": "key", "keys": ["Ctrl", "S"]}, GuiAction(kind="key", keys=("ctrl", "s"))),
        ({"action": "type", "text": "a\nb"}, GuiAction(kind="type", text="a\nb")),
        ({"action": "scroll", "pixels": -5}, GuiAction(kind="scroll", scroll_clicks=-5)),
        ({"action": "wait"}, GuiAction(kind="wait", time_s=1.0)),
        ({"action": "wait", "time": 0.5}, GuiAction(kind="wait", time_s=0.5)),
        ({"action": "terminate", "status": "failure"}, TerminateAction(status="failure")),
        (
            {"action": "code", "language": "bash", "execute_code": "ls"},
            CodeAction(language="bash", code="ls"),
        ),
        (
            {"action": "left_click", "coordinate": [1, 2], "keys": ["shift"]},
            GuiAction(kind="left_click", point=Point(x=1, y=2), keys=("shift",)),
        ),
    ],
)
def test_each_verb_becomes_its_typed_action(arguments: dict[str, Any], action: Any) -> None:
    assert parse(call(**arguments)) == action


def test_braces_and_tags_inside_strings_are_only_text() -> None:
    text = "if(a){b={c:[1,{d:2}]};} // }}})] </tool_call> <tool_call> </think> end"
    assert parse(call(action="type", text=text)) == GuiAction(kind="type", text=text)


def test_a_nested_argument_object_is_read_whole_and_named_as_unknown() -> None:
    text = call(action="type", text="half {[", opts={"clear": {"first": True}})
    assert code_of(text) == "unknown_field"
    mended = parse_lenient(text)
    assert mended.actions == [GuiAction(kind="type", text="half {[")]
    assert mended.repairs == ("unknown_field",)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "no_call"),
        ("I am done.", "no_call"),
        ("<tool_call>\n\n</tool_call>", "bad_json"),
        ('<tool_call>{"arguments":{"action":"wait"}}</tool_call>', "bad_call"),
        (
            '<tool_call>{"name":"custom_computer_use","arguments":"{\\"action\\": \\"wait\\"}"}</tool_call>',
            "arguments_as_text",
        ),
        ("<tool_call>[1,2]</tool_call>", "bad_call"),
        ('<tool_call>{"name":"a","arguments":{}}{"name":"b","arguments":{}}</tool_call>', "text_in_call"),
        ('<tool_call>{"name":"custom_computer_use","arguments":null}</tool_call>', "bad_call"),
        ('<tool_call>{"name":null,"arguments":{}}</tool_call>', "bad_call"),
        ('<tool_call>{"name":"custom_computer_use","arguments":{"action":"wait"}', "bad_json"),
        ('<tool_call>{"name":"custom_computer_use","arguments":{"action":"wait"}}', "unclosed_call"),
        (call(action="wait") + call(action="wait"), "several_calls"),
        (call(action="wait") + " That should do it.", "text_after_call"),
        (call(action="wait", time=float("nan")), "bad_json"),
        (
            '<tool_call>{"name":"custom_computer_use","arguments":{"action":"wait","action":"type"}}</tool_call>',
            "bad_json",
        ),
        ("<tool_call>" + "[" * 100_000, "bad_json"),
        ("<think> it is <tool_call>", "unclosed_thinking"),
        (call("shell", action="wait"), "unknown_tool"),
        (call(), "unknown_action"),
        (call(action=["wait"]), "unknown_action"),
        (call(action="fly"), "unknown_action"),
        (call(action="left_click"), "missing_field"),
        (call(action="left_click", coordinate=[1, 2], pixels=3), "unexpected_field"),
        (call(action="left_click", coordinate=[1001, 2]), "coordinate_out_of_range"),
        (call(action="left_click", coordinate=[5, -1]), "coordinate_out_of_range"),
        (call(action="key", keys="ctrl+s"), "keys_as_text"),
        (call(action="key", keys=["ctrl", "nokey"]), "bad_keys"),
        (call(action="key", keys=[]), "bad_keys"),
        (call(action="type", text=5), "bad_text"),
        (call(action="type", text="\ud800"), "bad_text"),
        (call(action="type", text="a\x00b"), "bad_text"),
        (call(action="scroll", pixels=0), "bad_number"),
        (call(action="scroll", pixels=True), "bad_number"),
        (call(action="scroll", pixels=10**400), "bad_number"),
        (call(action="wait", time=-1), "bad_number"),
        (call(action="terminate", status="done"), "bad_choice"),
        (call(action="code", language="ruby", execute_code="1"), "bad_choice"),
        (call(action="code", language="bash", execute_code=" "), "bad_text"),
    ],
)
def test_a_faulty_response_is_refused_by_name(text: str, code: str) -> None:
    assert code_of(text) == code


COORDINATES = [
    [330, 182],
    "[330, 182]",
    "330, 182",
    "(330,182)",
    ["330", "182"],
    [330.0, 182.4],
    "330 182",
    "<point>330 182</point>",
]


@pytest.mark.parametrize("value", COORDINATES, ids=str)
def test_every_shape_of_a_coordinate_is_the_same_point(value: Any) -> None:
    action = parse(call(action="left_click", coordinate=value))
    assert isinstance(action, GuiAction) and action.point is not None
    assert action.point.x == 330
    assert abs(action.point.y - 182) <= 0.5


BAD_COORDINATES: list[Any] = [
    "330,",
    [330],
    [330, 182, 5],
    "abc",
    [None, 182],
    [1e9, 3],
    ["nan", "inf"],
    {"x": 330},
    True,
    "__import__('os').getpid(), 3",
    "9**9**9, 1",
    "[x for x in (1,2)]",
    [[330, 182]],
    [True, False],
    "",
    "1_0, 2",
    "1e2, 2",
    ",".join(["1"] * 10**5),
    ["3" * 5000, "1"],
]


@pytest.mark.parametrize("value", BAD_COORDINATES, ids=lambda value: str(value)[:20])
def test_any_other_coordinate_is_refused_at_once_and_never_half_read(value: Any) -> None:
    started = time.perf_counter()
    assert code_of(call(action="left_click", coordinate=value)) in (
        "bad_coordinate",
        "coordinate_out_of_range",
    )
    assert time.perf_counter() - started < 0.1


@pytest.mark.parametrize("point", [[0, 300], [500, 0], [0, 0], [1000, 1000], [-0.0, 5]])
def test_zero_and_the_far_edge_are_coordinates(point: list[float]) -> None:
    action = parse(call(action="mouse_move", coordinate=point))
    assert isinstance(action, GuiAction) and action.point == Point(x=abs(point[0]), y=point[1])


def test_the_space_decides_what_is_offered() -> None:
    code = call(action="code", language="bash", execute_code="ls")
    assert code_of(code, space=ActionSpace(actions=("gui",))) == "action_not_offered"
    assert code_of(code, space=ActionSpace(os="windows")) == "bad_choice"
    assert code_of(call(action="wait"), space=ActionSpace(actions=("code",))) == "action_not_offered"
    assert parse(call(action="terminate", status="success"), space=ActionSpace(actions=("code",)))
    assert code_of(call("weather", city="Oslo"), space=ActionSpace()) == "unknown_tool"
    assert code_of(call("skill_library", route="DIRECT"), space=ActionSpace()) == "unknown_tool"
    assert len(parse_all(call(action="wait") * 2, space=ActionSpace(max_calls=2))) == 2


def test_tools_and_skills_are_actions_where_they_are_offered() -> None:
    assert parse(call("weather", city="Oslo", days=2), space=TOOLS) == McpAction(
        name="weather", arguments={"city": "Oslo", "days": 2}
    )
    assert code_of(call("weather", days=2), space=TOOLS) == "missing_field"
    assert code_of(call("weather", city="\ud800"), space=TOOLS) == "bad_text"
    assert parse(call("skill_library", route="QUERY_TEXT", query="sort"), space=TOOLS) == SkillAction(
        route="QUERY_TEXT", query="sort"
    )
    assert code_of(call("skill_library", route="BOTH"), space=TOOLS) == "bad_choice"


def test_reasoning_that_drafts_a_call_is_not_the_answer() -> None:
    draft, answer = call(action="wait"), call(action="type", text="</think>")
    action = parse(f"Perhaps {draft}? No.</think>\n{answer}")
    assert action == GuiAction(kind="type", text="</think>")
    action = parse(f"<think>{draft}</think>{answer}")
    assert action == GuiAction(kind="type", text="</think>")


XML = "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def xml(name: str = "custom_computer_use", **parameters: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return XML.format(name=name, parameters=body)


def test_xml_values_are_read_by_the_type_of_their_field() -> None:
    assert parse(xml(action="left_click", coordinate="[500, 250]"), "qwen_xml") == GuiAction(
        kind="left_click", point=Point(x=500, y=250)
    )
    assert parse(xml(action="key", keys='["ctrl", "c"]'), "qwen_xml") == GuiAction(
        kind="key", keys=("ctrl", "c")
    )
    assert parse(xml(action="type", text="12"), "qwen_xml") == GuiAction(kind="type", text="12")
    assert parse(xml(action="scroll", pixels="-3"), "qwen_xml") == GuiAction(kind="scroll", scroll_clicks=-3)
    assert parse(xml("weather", city="7", days="7"), "qwen_xml", TOOLS) == McpAction(
        name="weather", arguments={"city": "7", "days": 7}
    )


def test_xml_keeps_tags_and_line_breaks_that_belong_to_a_program() -> None:
    program = '\nprint("</parameter>")\n# <parameter=x> </function>\n'
    text = xml(action="code", language="python", execute_code=program)
    assert parse(text, "qwen_xml") == CodeAction(language="python", code=program)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (xml(), "unknown_action"),
        ("<tool_call>\n<function=a\n</tool_call>", "bad_xml"),
        ("<tool_call><function=custom_computer_use><parameter=action>wait</function></tool_call>", "bad_xml"),
        (XML.format(name="custom_computer_use", parameters="<parameter=action>wait</parameter>" * 2), "bad_xml"),
        ('<tool_call>{"name": "custom_computer_use", "arguments": {"action": "wait"}}</tool_call>', "other_family"),
    ],
)  # fmt: skip
def test_a_faulty_xml_call_is_refused_by_name(text: str, code: str) -> None:
    assert code_of(text, "qwen_xml") == code


@pytest.mark.parametrize(
    ("text", "repair"),
    [
        (call("computer", action="wait"), "unknown_tool"),
        (call(action="wait").removesuffix("\n</tool_call>"), "unclosed_call"),
        (call(action="wait").replace("}}", "}}}"), "text_in_call"),
        (call(action="wait") + " done", "text_after_call"),
        (call(action="wait") + call(action="type", text="x"), "several_calls"),
        ('{"name": "computer_use", "arguments": {"action": "wait"}}', "no_tag"),
        (xml(action="wait"), "other_family"),
    ],
)
def test_lenient_reading_mends_and_says_so(text: str, repair: str) -> None:
    result = parse_lenient(text)
    assert result.actions == [GuiAction(kind="wait", time_s=1.0)]
    assert result.repairs == (repair,)


def test_lenient_reading_of_a_valid_response_mends_nothing() -> None:
    assert parse_lenient(call(action="wait")).repairs == ()


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "custom_computer_use", "arguments": ', "{", "}", '"action": ', '"left_click"', ', "coordinate": ', "[", "]", "1e999", "<function=", "<parameter=", ">", "</parameter>", "</function>", "\\ud800", '"']
)  # fmt: skip


@given(
    st.one_of(st.binary(), st.text(), st.lists(PIECES, max_size=12).map("".join)),
    st.sampled_from(["qwen_json", "qwen_xml"]),
)
@example("<tool_call>" + '{"a":' * 50_000, "qwen_json")
@example(b"\xff\xfe<tool_call>\x00", "qwen_json")
@settings(max_examples=400, deadline=None)
def test_no_text_crashes_either_reading(text: str | bytes, family: str) -> None:
    for reading in (parse, parse_lenient):
        try:
            reading(text, family, TOOLS)
        except ActionParseError as error:
            assert error.code


GRID_POINT = st.builds(Point, x=st.integers(0, 1000), y=st.integers(0, 1000))
TYPED = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), min_size=1)
ACTIONS = st.one_of(
    st.builds(
        GuiAction, kind=st.sampled_from(["left_click", "mouse_move", "left_click_drag"]), point=GRID_POINT
    ),
    st.builds(GuiAction, kind=st.just("type"), text=TYPED),
    st.builds(
        GuiAction, kind=st.just("scroll"), scroll_clicks=st.integers(1, 9), point=st.none() | GRID_POINT
    ),
    st.builds(GuiAction, kind=st.just("wait"), time_s=st.sampled_from([0.0, 0.5, 3.0])),
    st.builds(GuiAction, kind=st.just("key"), keys=st.sampled_from([("ctrl", "s"), ("enter",), ("+",)])),
    st.builds(CodeAction, language=st.sampled_from(["python", "bash"]), code=TYPED.filter(str.strip)),
    st.builds(TerminateAction, status=st.sampled_from(["success", "failure"]), answer=st.just("") | TYPED),
    st.builds(SkillAction, route=st.sampled_from(["DIRECT", "QUERY_BOTH"]), query=st.just("") | TYPED),
)


@given(ACTIONS, st.sampled_from(["qwen_json", "qwen_xml"]))
@settings(max_examples=300, deadline=None)
@example(CodeAction(language="python", code="x</parameter>\n</function>"), "qwen_json")
def test_writing_and_reading_an_action_gives_it_back(action: Any, family: str) -> None:
    assert parse(format_action(action, family), family) == action
