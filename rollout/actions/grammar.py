"""Tool calls in a response, as each model family writes them.

qwen_json:  <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
qwen_xml:   <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>

JSON is read by a JSON decoder that is told where to start, so braces, tags and quotes inside strings are only text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout.actions.mending import Mender
from slime_cua.core.errors import ActionParseError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ENDS = ("<|im_end|>", "<|endoftext|>")
MAX_BARE_TRIES = 50


@dataclass(frozen=True)
class ToolCall:
    """A function name and its arguments; `is_text` says that the values are still text to be read by their type."""

    name: str
    arguments: dict[str, Any]
    is_text: bool = False


Reader = Callable[[str, int, Mender], tuple[ToolCall, int]]
"""Reads one call whose body starts at an index; gives the call and the index where the body ends."""


def tool_calls(text: str, family: str, mender: Mender) -> list[ToolCall]:
    """The calls of a response in order, after its reasoning; at least one.

    Raises ActionParseError: no_call, unclosed_thinking, text_after_call, bad_json, bad_call, bad_xml, unclosed_call.
    """
    reader = _READERS.get(family)
    if reader is None:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(sorted(_READERS))}")
    text = _without_ends(text)
    position = _after_thinking(text, reader, mender)
    calls: list[ToolCall] = []
    while (start := text.find(OPEN, position)) >= 0:
        if calls and text[position:start].strip():
            mender.allow("text_after_call", "there must be no text after a tool call")
        call, end = _read_one(text, start + len(OPEN), reader, mender)
        calls.append(call)
        position = _past_close(text, end, mender)
    if calls and text[position:].strip():
        mender.allow("text_after_call", "there must be no text after the tool call")
    return calls or [_bare_call(text, position, mender)]


def _without_ends(text: str) -> str:
    text = text.rstrip()
    while text.endswith(ENDS):
        text = text[: text.rfind("<|")].rstrip()
    return text


def _after_thinking(text: str, reader: Reader, mender: Mender) -> int:
    """Where the answer begins. A closing tag inside the string of a call that is read whole does not count."""
    think_end, first_call = text.find(THINK_CLOSE), text.find(OPEN)
    if think_end < 0:
        if text.lstrip().startswith(THINK_OPEN):
            mender.allow(
                "unclosed_thinking", f"the reasoning must be closed by {THINK_CLOSE} before the call"
            )
        return 0
    if 0 <= first_call < think_end:
        try:
            _, end = reader(text, first_call + len(OPEN), Mender())
        except ActionParseError:
            end = -1
        if end > think_end:
            return 0
    return think_end + len(THINK_CLOSE)


def _read_one(text: str, index: int, reader: Reader, mender: Mender) -> tuple[ToolCall, int]:
    index = _skip_space(text, index)
    other = _read_xml if reader is _read_json else _read_json
    is_other = text.startswith("<function=" if reader is _read_json else "{", index)
    if is_other:
        mender.allow("other_family", f"write the call as {_EXAMPLES[reader]}")
        return other(text, index, mender)
    return reader(text, index, mender)


def _past_close(text: str, index: int, mender: Mender) -> int:
    index = _skip_space(text, index)
    if text.startswith(CLOSE, index):
        return index + len(CLOSE)
    closing = text.find(CLOSE, index)
    if closing >= 0:
        mender.allow("text_in_call", f"only one call may stand between {OPEN} and {CLOSE}")
        return closing + len(CLOSE)
    mender.allow("unclosed_call", f"the call must end with {CLOSE}")
    return len(text)


def _bare_call(text: str, position: int, mender: Mender) -> ToolCall:
    """A call without its tag, for lenient reading only."""
    missing = ActionParseError("no_call", f"the response must hold one call between {OPEN} and {CLOSE}")
    if not mender.is_lenient:
        raise missing
    for _ in range(MAX_BARE_TRIES):
        position = text.find("{", position)
        if position < 0:
            break
        try:
            call, _ = _read_json(text, position, mender)
        except ActionParseError:
            position += 1
            continue
        mender.allow("no_tag", missing.args[0])
        return call
    raise missing


def _read_json(text: str, index: int, mender: Mender) -> tuple[ToolCall, int]:
    index = _skip_space(text, index)
    value, end = decode_json(text, index, mender)
    if not isinstance(value, dict):
        raise ActionParseError("bad_call", 'a call must be a JSON object with "name" and "arguments"')
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        raise ActionParseError("bad_call", '"name" must be the name of a function')
    if isinstance(arguments, str):
        mender.allow("arguments_as_text", '"arguments" must be an object, not a string')
        arguments, _ = decode_json(arguments, 0, mender)
    if not isinstance(arguments, dict):
        raise ActionParseError("bad_call", '"arguments" must be an object')
    if extra := sorted(set(value) - {"name", "arguments"}):
        mender.allow("bad_call", f'a call holds "name" and "arguments" only, not {extra[0][:40]!r}')
    return ToolCall(name, arguments), end


def decode_json(text: str, index: int, mender: Mender) -> tuple[Any, int]:
    """The JSON value at `index` and the index after it. No NaN, no repeated keys; bad_json otherwise."""
    try:
        return _STRICT.raw_decode(text, index)
    except (ValueError, RecursionError) as error:
        fault = ActionParseError("bad_json", f"the call is not valid JSON: {_reason(error)}")
    if mender.is_lenient:
        try:
            value = _LOOSE.raw_decode(text, index)
        except (ValueError, RecursionError):
            raise fault from None
        mender.allow("bad_json", str(fault))
        return value
    raise fault


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:80]


def _object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object names the same key twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_object_once, parse_constant=_no_constant)
_LOOSE = json.JSONDecoder(parse_constant=_no_constant, strict=False)


def _read_xml(text: str, index: int, mender: Mender) -> tuple[ToolCall, int]:
    name, index = _tag_value(text, _skip_space(text, index), "<function=")
    arguments: dict[str, str] = {}
    while True:
        index = _skip_space(text, index)
        if text.startswith("</function>", index):
            return ToolCall(name, dict(arguments), is_text=True), index + len("</function>")
        key, index = _tag_value(text, index, "<parameter=")
        value, index = _parameter_text(text, index)
        if key in arguments:
            raise ActionParseError("bad_xml", f"parameter {key[:40]!r} is given twice")
        arguments[key] = value


def _tag_value(text: str, index: int, opening: str) -> tuple[str, int]:
    """NAME of `<function=NAME>` or `<parameter=NAME>` at `index`, and the index after the tag."""
    end = text.find(">", index)
    name = text[index + len(opening) : end]
    if not text.startswith(opening, index) or end < 0 or not name or any(char in name for char in "<\n ="):
        raise ActionParseError(
            "bad_xml", f"expected {opening}NAME> at character {index}; write the call as {_XML_EXAMPLE}"
        )
    return name, end + 1


def _parameter_text(text: str, index: int) -> tuple[str, int]:
    """The value up to the closing tag that another parameter or the end of the function follows.

    One line break on each side belongs to the grammar. A closing tag followed by anything else is part of the value.
    """
    closing, search = "</parameter>", index
    while (end := text.find(closing, search)) >= 0:
        after = _skip_space(text, end + len(closing))
        if text.startswith(("<parameter=", "</function>"), after):
            value = text[index:end]
            value = value.removeprefix("\n")
            return value.removesuffix("\n"), end + len(closing)
        search = end + len(closing)
    raise ActionParseError("bad_xml", f"a parameter must end with {closing}")


def _skip_space(text: str, index: int) -> int:
    while index < len(text) and text[index] in " \t\r\n":
        index += 1
    return index


_XML_EXAMPLE = "<function=NAME><parameter=KEY>VALUE</parameter></function>"
_EXAMPLES: dict[Reader, str] = {
    _read_json: '{"name": NAME, "arguments": {...}}',
    _read_xml: _XML_EXAMPLE,
}
_READERS: dict[str, Reader] = {"qwen_json": _read_json, "qwen": _read_json, "qwen_xml": _read_xml}
